"""`attention` in a graph of torch.compile: two ops, which hold all that is said between ranks.

`torch.ops.flash_ext.context_parallel` and its backward op take what a graph can hold: tensors,
numbers, and groups by their names, as torch's functional collectives do. Documents are a tensor, so
others are no reason to compile again. When the graph runs they do what `attention` does outside of
one, its checks included, with one difference: only inputs, out and lse are saved for the backward
pass, so Ulysses sends q, k, v and out to the ranks of their heads once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from ...ops.checks import statistics_dtype
from ...ops.torch_private import process_group_of
from .local import Options
from .methods import Groups
from .request import Group, Request, groups_of, prepare
from .ulysses import Core

available = process_group_of is not None
"""Whether this torch finds a group by its name. If not, attention is outside of graphs."""


_Prepared = tuple[Core, tuple[Tensor, Tensor, Tensor], Options]


class _Settings(NamedTuple):
    """What both ops are given beside q, k and v, in this order."""

    cu_seqlens: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    across: str
    within: str
    """The names of the groups; "" for one level."""

    method: str
    transport: str
    layout: str
    seqlen: int | None
    causal: bool
    left: int
    right: int
    gradients: bool
    scale: float | None
    softcap: float
    deterministic: bool
    variant: str

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, new: bool) -> _Prepared:
        """As `request.prepare`, and the options of the ops."""
        assert process_group_of is not None
        groups = Groups(*(process_group_of(name) for name in (self.across, self.within) if name))
        window = self.left, self.right
        request = Request(
            self.method, self.transport, self.layout, self.seqlen, self.causal, window,
            self.gradients,
        )  # fmt: skip
        options: Options = {}
        for name in ("alibi_slopes", "sink", "scale"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        for name, default in (("softcap", 0.0), ("deterministic", False), ("variant", "auto")):
            if getattr(self, name) != default:
                options[name] = getattr(self, name)
        return *prepare(request, groups, q, k, v, self.cu_seqlens, options, new), options


_SCHEMA = (
    "Tensor? cu_seqlens, Tensor? alibi_slopes, Tensor? sink, str across, str within, str method,"
    " str transport, str layout, SymInt? seqlen, bool causal, SymInt left, SymInt right,"
    " bool gradients, float? scale, float softcap, bool deterministic, str variant"
)


def attention(
    request: Request,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """out and lse by the op; `options` are those of the ops."""
    groups = groups_of(group)
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int64, device="cpu")
    settings = _Settings(
        cu_seqlens,
        options.get("alibi_slopes"),
        options.get("sink"),
        groups.across.group_name,
        "" if groups.within is None else groups.within.group_name,
        request.method,
        request.transport,
        request.layout,
        request.seqlen,
        request.causal,
        *request.window,
        request.gradients,
        options.get("scale"),
        options.get("softcap", 0.0),
        options.get("deterministic", False),
        options.get("variant", "auto"),
    )
    found: tuple[Tensor, Tensor] = _forward(q, k, v, *settings)
    return found


@custom_op(
    "flash_ext::context_parallel",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    settings = _Settings(*given)
    core, tensors, options = settings.prepare(q, k, v, new=True)
    out, lse = (x.contiguous() for x in core.forward(*tensors, options)[-2:])
    return (out, lse) if settings.cu_seqlens is None else (out[0], lse[0])


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *batch, rows, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, rows), dtype=statistics_dtype(q.dtype))
    return q.new_empty((*batch, rows, heads, v.shape[-1])), lse


@custom_op(
    "flash_ext::context_parallel_backward",
    mutates_args=(),
    schema=(
        "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
        f" {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *given: Any,
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsink, which without a sink has no elements."""
    settings = _Settings(*given)
    core, tensors, options = settings.prepare(q, k, v, new=False)
    packed = settings.cu_seqlens is not None
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    if packed:
        dout, out, lse = dout[None], out[None], lse[None]
        dlse = None if dlse is None else dlse[None]
    saved = core.saved_again(*tensors, out, lse)
    *gradients, dsink = core.backward(saved, dout, dlse, options)
    dq, dk, dv = (x.contiguous() for x in gradients)
    if packed:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


@_backward.register_fake
def _(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *given: Any,
) -> tuple[Tensor, ...]:
    sink = _Settings(*given).sink
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsink


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *given = inputs
    settings = _Settings(*given)
    ctx.save_for_backward(q, k, v, *output, *settings[:3])
    ctx.settings = settings[3:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens, alibi_slopes, sink = ctx.saved_tensors
    settings = _Settings(cu_seqlens, alibi_slopes, sink, *ctx.settings)
    dq, dk, dv, dsink = _backward(dout, dlse, *tensors, *settings)
    return dq, dk, dv, None, None, None if sink is None else dsink, *(len(ctx.settings) * [None])


_forward.register_autograd(_gradients, setup_context=_save)
