"""What a call asks for: its checks, the ranks' agreement on it, and the method that does it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ... import ops
from ...ops.checks import dtype_name, refuse, require_device
from ...ops.options import QK_8_BITS
from .agree import agree
from .calls import Mask
from .local import Options
from .methods import Groups, build, choose_method, unsupported_reason
from .sharding import Documents, Sharding, documents_of, sharding
from .symmetric import TRANSPORTS, make, require
from .ulysses import Core

Group = ProcessGroup | DeviceMesh | None
"""A process group, None for all ranks; or a mesh of one dimension, or of two: (across, within)."""


def groups_of(group: Group) -> Groups:
    """The process groups that a call communicates in.

    Raises:
        ValueError: a mesh of more than two dimensions, or no process group was made.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            refuse("group", "a mesh of one or two dimensions", f"one of {group.ndim}")
        return Groups(*(group.get_group(i) for i in range(group.ndim)))
    if group is None and not dist.is_initialized():
        refuse("group", "given, or a default one made by init_process_group", None)
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    return Groups(whole)


def shards_of(groups: Groups, rows: int, layout: str, documents: Documents | None) -> Sharding:
    """The rows of every rank; with two dimensions rank (i, j) is number i · (size of j) + j."""
    shards = sharding(rows, groups.across_size, layout, documents)
    return shards if groups.within is None else shards.nested(groups.within_size)


def on_host(cu_seqlens: Tensor | Sequence[int] | None) -> Documents | None:
    """cu_seqlens as numbers of the host."""
    if cu_seqlens is None:
        return None
    return documents_of(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)


def require_documents(documents: Documents, rows: int) -> None:
    """Refuse what cannot be cu_seqlens of so many rows."""
    if not documents or documents[0] != 0 or documents.shortest < 0 or documents[-1] > rows:
        refuse(
            "cu_seqlens",
            f"from 0 on, never decreasing, up to the sequence's {rows} rows",
            tuple(documents),
        )


class Request(NamedTuple):
    """Arguments of `attention` that are neither tensors nor options of the ops."""

    method: str
    transport: str
    layout: str
    seqlen: int | None
    causal: bool
    window: tuple[int, int]
    gradients: bool
    """Whether a backward pass may follow."""


def _check_rows(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    rows: int,
) -> Sharding:
    """Refuse documents, and numbers of rows of the tensors, that `rows` of the sequence cannot
    have; return what each rank has."""
    if documents is not None:
        require_documents(documents, rows)
    shards, rank = shards_of(groups, rows, request.layout, documents), groups.rank
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[-3] != shards.lengths[rank]:
            refuse(
                f"{name}'s number of rows on rank {rank}",
                f"{shards.lengths[rank]} of the sequence's {rows} (pass seqlen where the"
                " ranks' numbers of rows are not equal)",
                x.shape[-3],
            )
    return shards


def _check(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    rows: int,
    mask: Mask,
    options: Options,
) -> None:
    """Refuse what is wrong on this rank, before anything travels. `rows`: of the sequence."""
    dims = 4 if documents is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            wanted = "(batch, rows, heads, dim)" if dims == 4 else "(rows, heads, dim)"
            with_documents = "" if dims == 4 else " with cu_seqlens"
            refuse(name, f"of shape {wanted}{with_documents}", tuple(x.shape))
        require_device(name, x, q)
    shards = _check_rows(request, groups, q, k, v, documents, rows)
    slopes = options.get("alibi_slopes")
    if documents is not None and slopes is not None and slopes.dim() != 1:
        refuse("alibi_slopes", "of shape (heads_q) with cu_seqlens", tuple(slopes.shape))
    if q.dtype in QK_8_BITS:
        refuse("q", "of more than 8 bits", dtype_name(q.dtype))
    method, transport = request.method, request.transport
    if method != "auto" and (
        reason := unsupported_reason(method, groups, q, k, shards, mask, options)
    ):
        raise ValueError(f"flash_ext: {reason}")
    if transport not in TRANSPORTS:
        refuse("transport", " or ".join(map(repr, TRANSPORTS)), repr(transport))
    masks: Options = {"causal": mask.right == 0}
    if mask.left is not None:
        masks["window_left"] = mask.left
    ops.check(*(x if dims == 4 else x[None] for x in (q, k, v)), **options, **masks)


def _agree(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    rows: int,
    mask: Mask,
    options: Options,
) -> None:
    """Return if all ranks ask for the same, and nothing is wrong; as `_check`."""
    same: dict[str, Any] = {
        "batch": q.shape[0] if q.dim() == 4 else None,
        "heads of q": q.shape[-2],
        "heads of k": k.shape[-2],
        "heads of v": v.shape[-2],
        "head dim of q": q.shape[-1],
        "head dim of k": k.shape[-1],
        "head dim of v": v.shape[-1],
        "dtypes of q, k and v": tuple(dtype_name(x.dtype) for x in (q, k, v)),
        "contiguous rows of q, k and v": tuple(x.stride(-1) == 1 for x in (q, k, v)),
        "gradients wanted": request.gradients,
        "layout": request.layout,
        "method": request.method,
        "transport": request.transport,
        "causal": request.causal,
        "window": request.window,
        "with cu_seqlens": documents is not None,
    }
    for name, value in options.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else value
        same[name] = ("a tensor", *shape) if isinstance(value, Tensor) else value
    named = "seqlen"
    if request.seqlen is None:
        named = "seqlen (which must be given where ranks have unequal numbers of rows)"
    packing: dict[str, Any] = {} if documents is None else {"cu_seqlens": documents}
    (same if documents is None else packing)[named] = rows
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    asked = request, groups, q, k, v, documents, rows
    check, check_rows = partial(_check, *asked, mask, options), partial(_check_rows, *asked)
    agree(groups.last_first, same, packing, shapes, check, check_rows, q.device)


def prepare(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    options: Options,
    new: bool = True,
) -> tuple[Core, tuple[Tensor, Tensor, Tensor]]:
    """The method for this rank, and q, k and v as it takes them: (B, rows, H, D).

    Args:
        request: what is asked for.
        groups: whose ranks all call this.
        q, k, v, cu_seqlens: as in `attention`.
        options: of the ops.
        new: whether anything may be wrong: not in the backward pass of a call.

    Raises:
        ValueError, RuntimeError: as `attention` does.
    """
    documents, seqlen = on_host(cu_seqlens), request.seqlen
    mask = Mask.of(request.causal, request.window, documents)
    if seqlen is None:
        seqlen = documents[-1] if documents else q.shape[-3] * groups.ranks
    if new:
        _agree(request, groups, q, k, v, documents, seqlen, mask, options)
    shards = shards_of(groups, seqlen, request.layout, documents)
    require(request.transport, groups.last_first, q.device)
    if documents is not None:
        q, k, v = (x[None] for x in (q, k, v))
    method = request.method
    if method == "auto":
        method = choose_method(groups, q, k, v, shards, mask, options, request.transport)
    moves = partial(make, request.transport, q.device)
    return build(method, groups, shards, mask, q, k, v, moves), (q, k, v)
