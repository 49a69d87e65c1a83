"""A call of a plan, on tensors: views of the rows that it names, and the ops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...ops.into import bwd_into, fits, fwd_into
from ...ops.options import BackwardTensors
from .on_device import on_device
from .packing import Call
from .sharding import Span
from .transport import narrowed, total

Options = dict[str, Any]
"""Options of the ops, without masks and sequences."""


def of_heads(options: Options, first: int, last: int) -> Options:
    """The options of some of the query heads."""
    chosen = dict(options)
    if "alibi_slopes" in options:
        chosen["alibi_slopes"] = options["alibi_slopes"][..., first:last]
    if "sink" in options:
        chosen["sink"] = options["sink"][first:last].contiguous()
    return chosen


def head_pieces(heads_q: int, pieces: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """The heads of q and of k in pieces of these numbers of heads of k."""
    group = heads_q // sum(pieces)
    for a, b in itertools.pairwise((0, *itertools.accumulate(pieces))):
        yield slice(a * group, b * group), slice(a, b)


def options_of(call: Call, options: Options, device: torch.device) -> Options:
    """The ops' options with the call's mask and sequences, for what the current stream does next
    and what waits for it."""
    chosen = dict(options)
    if not call.own:
        chosen.pop("sink", None)
    left, right = call.window
    if right == 0:
        chosen["causal"], right = True, -1
    if left >= 0:
        chosen["window_left"] = left
    if right >= 0:
        chosen["window_right"] = right
    if call.packed is not None:
        chosen |= call.packed.on(device)
    if call.used is not None:
        chosen["seqused_k"] = on_device(call.used, device)
    return chosen


def view(call: Call, x: Tensor, span: Span, dim: int = -3) -> Tensor:
    """Rows of x (B, rows, H, D), or with dim -1 of (B, H, rows), as the call's op has them: without
    B if sequences are packed."""
    x = narrowed(x, span, dim)
    return x if call.packed is None else x.squeeze(0)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, options: Options, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The call's own attention.

    Args:
        call: which rows.
        q: all rows of the queries (B, rows, Hq, D).
        k, v: all rows of the keys at hand (B, rows_k, Hk, D) and (B, rows_k, Hk, Dv).
        options: of the ops.
        into: (B, m, Hq, Dv), where out is written; without it, a new tensor.

    Returns:
        out (B, m, Hq, Dv) and lse (B, Hq, m) of the call's m queries, as if there were no other
        keys.
    """
    if into is not None:
        into = view(call, into, (0, into.shape[1]))
    q, k, v = view(call, q, call.q), view(call, k, call.k), view(call, v, call.k)
    out, lse = forward_of_views(call, q, k, v, options_of(call, options, q.device), into)
    return (out, lse) if call.packed is None else (out[None], lse[None])


def forward_of_views(
    call: Call, q: Tensor, k: Tensor, v: Tensor, options: Options, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `forward`: all tensors come from `view`, options from `options_of`."""
    if call.batch_step is None:
        return _forward(q, k, v, options, into)
    halves = None if into is None else _halves(into)
    q, k, v, options = _batch_of_two(call, q, k, v, options)
    out, lse = _forward(q, k, v, options, halves)
    return out.flatten(0, 1)[None], lse.transpose(0, 1).flatten(1)[None]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    if into is None:
        return ops.forward(q, k, v, **options)  # type: ignore[no-any-return]
    if fits(into):
        return into, fwd_into(into, q, k, v, **options)
    out, lse = ops.forward(q, k, v, **options)
    return into.copy_(out), lse


def _halves(x: Tensor) -> Tensor:
    """(1, 2 m, …) as (2, m, …)."""
    return x.view(2, -1, *x.shape[2:])


def _batch_of_two(
    call: Call, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Two halves of the queries (1, 2 m, Hq, D) as a batch, whose keys are views of the same."""
    assert call.used is not None and call.batch_step is not None
    if options.get("alibi_slopes", q).dim() == 2:
        options = options | {"alibi_slopes": options["alibi_slopes"].expand(2, -1)}
    keys, values = (_overlapping(x[0], call.used[1], call.batch_step) for x in (k, v))
    return _halves(q), keys, values, options


def _overlapping(x: Tensor, rows: int, step: int) -> Tensor:
    """(2, rows, H, D): rows of x from 0 on and from `step` on."""
    row, head, element = x.stride()
    shape = (2, rows, *x.shape[1:])
    return x.as_strided(shape, (step * row, row, head, element))


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients that pass through the call.

    Args:
        call: which rows.
        dout, dlse, q, out, lse: of all queries. out and lse come from all keys, not the call's:
            so P = exp(S - lse) is the call's part of the whole softmax.
        k, v: all rows of the keys at hand.
        options: of the ops.

    Returns:
        dq (B, m, Hq, D), and dk and dv of the call's keys, in the inputs' dtype; and dsink, where
        the call takes the sink.
    """
    x = BackwardTensors(
        dout=view(call, dout, call.q),
        dlse=None if dlse is None else view(call, dlse, call.q, -1),
        q=view(call, q, call.q),
        k=view(call, k, call.k),
        v=view(call, v, call.k),
        out=view(call, out, call.q),
        lse=view(call, lse, call.q, -1),
    )
    into = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x.q, x.k, x.v)]
    dsink = backward_of_views(call, x, options_of(call, options, q.device), into)
    dq, dk, dv = into if call.packed is None else (y[None] for y in into)
    return dq, dk, dv, dsink


def backward_of_views(
    call: Call, x: BackwardTensors, options: Options, into: Sequence[Tensor]
) -> Tensor | None:
    """As `backward`, into dq, dk and dv: all tensors come from `view`, options from
    `options_of`. Returns dsink."""
    written = into
    if call.batch_step is not None:
        q, k, v, options = _batch_of_two(call, x.q, x.k, x.v, options)
        lse, dlse = (
            None if y is None else y.unflatten(2, (2, -1))[0].transpose(0, 1)
            for y in (x.lse, x.dlse)
        )
        assert lse is not None
        x = BackwardTensors(_halves(x.dout), dlse, q, k, v, _halves(x.out), lse)
        of_halves = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (k, v)]
        written = [_halves(into[0]), *of_halves]
    x = x._replace(lse=x.lse.contiguous(), dlse=None if x.dlse is None else x.dlse.contiguous())
    if fits(*written):
        dsink = bwd_into(*written, *x, **options)
    else:
        *found, _, dsink = ops.bwd(*x, **options)
        for y, gradient in zip(written, found, strict=True):
            y.copy_(gradient)
    if call.batch_step is not None:
        assert call.used is not None
        firsts = 0, call.batch_step
        halves = [
            ((first, first + used), tuple(y[i : i + 1, :used] for y in of_halves))
            for i, (first, used) in enumerate(zip(firsts, call.used, strict=True))
        ]
        total(halves, (into[1], into[2]))
    return dsink if "sink" in options else None


def add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum of two gradients, where None is 0."""
    if total is None or part is None:
        return part if total is None else total
    return total + part
