"""`attention`: what people call, and its autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import ops
from ...functional import attention_options
from ...ops.autograd import autocast_tensors
from ...ops.call import autocasts
from ...ops.checks import require_pair, require_tensors
from ...ops.torch_private import below_in_place
from . import graph
from .local import Options
from .request import Group, Request, groups_of, prepare
from .ulysses import Core


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
            tuple, a list or a tensor on the CPU. A tensor on a GPU is waited for. In torch.compile
            a tensor, if they change: for other numbers in a tuple it compiles again.
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
            on every rank, at the first call of a new signature, naming what differs. New documents
            are no new signature: what is wrong with this rank's is raised here, and that they are
            not the same on all ranks some calls later; at once with FLASH_EXT_DEBUG=1 in the
            environment, which waits for the other ranks.
        RuntimeError: a transfer failed or timed out; the message names it.
    """
    require_tensors(q=q, k=k, v=v)
    in_graph = (is_compiling() or not ops.is_real(q)) and graph.available
    if in_graph and torch.is_autocast_enabled(q.device.type) or not in_graph and autocasts(q):
        q, k, v = autocast_tensors(q.device.type, q, k, v)
    options = attention_options(
        q,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        deterministic=deterministic,
        variant=variant,
    )
    left, right = require_pair("window", window)
    of_inputs = (x.requires_grad for x in (q, k, v, options.get("sink")) if x is not None)
    gradients = torch.is_grad_enabled() and any(of_inputs)
    request = Request(method, transport, layout, seqlen, causal, (left, right), gradients)
    if in_graph:
        out, lse = graph.attention(request, group, q, k, v, cu_seqlens, options)
    else:
        out, lse = _attention(request, group, q, k, v, cu_seqlens, options)
    return (out, lse) if return_lse else out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    request: Request,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """out and lse, outside graphs of a compiler."""
    packed = cu_seqlens is not None
    core, tensors = prepare(request, groups_of(group), q, k, v, cu_seqlens, options)
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        core, options, *tensors, options.get("sink")
    )
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)  # backward copies nothing
