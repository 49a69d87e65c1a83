"""`attention`: what people call, and its autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ... import ops
from ...functional import attention_options
from ...ops.autograd import autocast_tensors
from ...ops.call import autocasts
from ...ops.checks import dtype_name, refuse, require_device, require_pair, require_tensors
from ...ops.options import QK_8_BITS
from ...ops.torch_private import below_in_place
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
    ordered = bool((documents.offsets.diff() >= 0).all())
    if not documents or documents[0] != 0 or not ordered or documents[-1] > rows:
        refuse(
            "cu_seqlens",
            f"from 0 on, never decreasing, up to the sequence's {rows} rows",
            tuple(documents),
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        core: Core,
        options: Options,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """sink is among the options too; as an argument autograd sees it."""
        with below_in_place():
            saved = core.forward(q, k, v, options)
        constants = {name: x for name, x in options.items() if not isinstance(x, Tensor)}
        tensors = {name: x for name, x in options.items() if isinstance(x, Tensor)}
        ctx.core, ctx.options, ctx.names = core, constants, tuple(tensors)
        ctx.save_for_backward(*saved, *tensors.values())
        ctx.set_materialize_grads(False)
        return saved[-2], saved[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        every = ctx.saved_tensors  # once: activation checkpointing recomputes them here
        count = len(every) - len(ctx.names)
        saved, tensors = every[:count], every[count:]
        options = ctx.options | dict(zip(ctx.names, tensors, strict=True))
        if dout is None:
            dout = torch.zeros_like(saved[-2])
        elif dout.stride(-1) != 1:
            dout = dout.contiguous()
        with below_in_place():
            dq, dk, dv, dsink = ctx.core.backward(saved, dout, dlse, options)
        return None, None, dq, dk, dv, dsink


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    documents: Documents | None,
    rows: int,
    layout: str,
    method: str,
    groups: Groups,
    mask: Mask,
    transport: str,
) -> None:
    """Refuse what is wrong on this rank, before anything travels. `rows`: of the sequence."""
    dims = 4 if documents is None else 3
    if documents is not None:
        require_documents(documents, rows)
    shards, rank = shards_of(groups, rows, layout, documents), groups.rank
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            wanted = "(batch, rows, heads, dim)" if dims == 4 else "(rows, heads, dim)"
            with_documents = "" if dims == 4 else " with cu_seqlens"
            refuse(name, f"of shape {wanted}{with_documents}", tuple(x.shape))
        require_device(name, x, q)
        if x.shape[dims - 3] != shards.lengths[rank]:
            refuse(
                f"{name}'s number of rows on rank {rank}",
                f"{shards.lengths[rank]} of the sequence's {rows} (pass seqlen where the"
                " ranks' numbers of rows are not equal)",
                x.shape[dims - 3],
            )
    slopes = options.get("alibi_slopes")
    if documents is not None and slopes is not None and slopes.dim() != 1:
        refuse("alibi_slopes", "of shape (heads_q) with cu_seqlens", tuple(slopes.shape))
    if q.dtype in QK_8_BITS:
        refuse("q", "of more than 8 bits", dtype_name(q.dtype))
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


def _signature(
    q: Tensor, k: Tensor, v: Tensor, options: Options, more: dict[str, Any]
) -> dict[str, Any]:
    """What must be the same on every rank."""
    batch = q.shape[0] if q.dim() == 4 else None
    found: dict[str, Any] = {
        "batch": batch,
        "heads of q": q.shape[-2],
        "heads of k": k.shape[-2],
        "heads of v": v.shape[-2],
        "head dim of q": q.shape[-1],
        "head dim of k": k.shape[-1],
        "head dim of v": v.shape[-1],
        "dtypes of q, k and v": tuple(dtype_name(x.dtype) for x in (q, k, v)),
        "contiguous rows of q, k and v": tuple(x.stride(-1) == 1 for x in (q, k, v)),
        "gradients wanted": torch.is_grad_enabled()
        and any(x.requires_grad for x in (q, k, v, options.get("sink")) if x is not None),
    }
    for name, value in options.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else value
        found[name] = ("a tensor", *shape) if isinstance(value, Tensor) else value
    return found | more


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    transport: str = "auto",
    layout: str = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    variant: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    transport: str = "auto",
    layout: str = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    variant: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    transport: str = "auto",
    layout: str = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    variant: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_ext.attention` of one sequence that is split over ranks (context parallelism).

    Every rank of the group calls this with its rows, which `shard` cuts out of the whole, and gets
    its rows of out. Differentiable in q, k, v and sink, through out and through lse. The results
    are those of the whole sequence on one device, up to rounding.

    A query sees keys by their positions in the whole sequence. All options mean what they mean
    there. Sources: Llama 3 (arXiv 2407.21783, section 3.3.2) for "all_gather", Ring Attention
    (arXiv 2310.01889) for "ring", DeepSpeed-Ulysses (arXiv 2309.14509) for "ulysses".

    Args:
        q: this rank's queries (B, rows, Hq, D), float16 or bfloat16; on CPU also float32 and
            float64. With cu_seqlens (rows, Hq, D).
        k: its keys (B, rows, Hk, D), the same rows of the sequence. Hq is a multiple of Hk.
        v: its values (B, rows, Hk, Dv).
        group: the ranks that share the sequence: a process group, a DeviceMesh of one dimension, or
            None for all ranks. A DeviceMesh of two dimensions (across, within) is for two levels:
            Ulysses within the last dimension, and `method` across the first.
        method: "all_gather", "ring", "ulysses", or "auto" for that of the shortest time by the
            model of `flash_ext.integrations.distributed.cost`.
        transport: "collectives" of the group's backend; "copy_engines", copies between the GPUs of
            one host that leave the SMs to the kernels beside them; or "auto" for copies where they
            work. A CUDA graph captures collectives.
        layout: which rows a rank has: "zigzag", balanced under a causal mask; "contiguous"; or
            "document_zigzag", the zigzag of each document. `position_ids` lists them.
        seqlen: S, the number of rows in all. None: the last of cu_seqlens, or this rank's rows
            times the number of ranks. Where S does not divide, ranks have unequal numbers of rows,
            and it must be given.
        cu_seqlens: (documents + 1) offsets of documents in the whole sequence, the same on every
            rank; a document may lie on several ranks, and sees only itself. Numbers of the host: a
            tuple, a list or a tensor on the CPU. A tensor on a GPU is waited for.
        scale, causal, window, softcap, deterministic, variant: as in `flash_ext.attention`.
        alibi_slopes: as there, with cu_seqlens only (Hq). "all_gather" takes them only with causal,
            "ring" not at all.
        sink: (Hq), the same on every rank. Its gradient is this rank's share: add them up over the
            group, as those of every parameter.
        return_lse: return lse too.

    Returns:
        out (B, rows, Hq, Dv) in q's dtype, or (rows, Hq, Dv) with cu_seqlens; with return_lse the
        pair (out, lse), lse (B, Hq, rows) or (Hq, rows) in float32 (float64 for float64).

    Raises:
        ValueError: an argument is wrong, or the ranks disagree on shapes, dtypes or options: raised
            on every rank, at the first call of a new signature, naming what differs.
        RuntimeError: a transfer failed or timed out; the message names it.
    """
    require_tensors(q=q, k=k, v=v)
    if autocasts(q):
        q, k, v = autocast_tensors(q.device.type, q, k, v)
    given = attention_options(
        q,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        deterministic=deterministic,
        variant=variant,
    )
    window = require_pair("window", window)
    groups = groups_of(group)
    documents = on_host(cu_seqlens)
    mask = Mask.of(causal, window, documents)
    named = "seqlen"
    if seqlen is None:
        named = "seqlen (which must be given where ranks have unequal numbers of rows)"
        seqlen = documents[-1] if documents else q.shape[-3] * groups.ranks
    more = {
        "layout": layout,
        "method": method,
        "transport": transport,
        "causal": causal,
        "window": window,
        "with cu_seqlens": documents is not None,
    }
    packing: dict[str, Any] = {} if documents is None else {"cu_seqlens": documents}
    (more if documents is None else packing)[named] = seqlen
    agree(
        groups.last_first,
        _signature(q, k, v, given, more),
        packing,
        tuple(tuple(x.shape) for x in (q, k, v)),
        partial(_check, q, k, v, given, documents, seqlen, layout, method, groups, mask, transport),
        q.device,
    )
    shards = shards_of(groups, seqlen, layout, documents)
    require(transport, groups.last_first, q.device)
    if documents is not None:
        q, k, v = (x[None] for x in (q, k, v))
    if method == "auto":
        method = choose_method(groups, q, k, v, shards, mask, given, transport)
    core = build(method, groups, shards, mask, q, k, v, partial(make, transport, q.device))
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        core, given, q, k, v, given.get("sink")
    )
    if documents is not None:
        out, lse = out.squeeze(0), lse.squeeze(0)  # whose backward copies nothing
    return (out, lse) if return_lse else out
