"""What people call: `attention`, its autograd node and its ops in a graph; `shard` and the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.library import custom_op
from typing_extensions import Unpack

from ... import ops
from ...functional import attention_options
from ...ops.autograd import as_kernels_take, autocast_tensors, save, saved
from ...ops.call import autocasts
from ...ops.checks import refuse, require_pair, require_tensors, statistics_dtype
from ...ops.torch_private import below_in_place, process_group_of
from .algorithms import Core
from .local import Options
from .methods import Groups, outer_of
from .on_device import HOST
from .request import Group, Request, groups_of, on_host, prepare, require_documents, shards_of
from .sharding import Sharding, sharding
from .transport import Collectives

# -------------------------------------------------------------------------------------- in a graph
# `attention` in a graph of torch.compile: two ops, which hold all that is said between ranks.
#
# `torch.ops.flash_ext.context_parallel` and its backward op take what a graph can hold: tensors,
# numbers, and groups by their names, as torch's functional collectives do. Documents are a tensor,
# so others are no reason to compile again. When the graph runs they do what `attention` does
# outside of one, its checks included, with one difference: only inputs, out and lse are saved for
# the backward pass, so Ulysses sends q, k, v and out to the ranks of their heads once more.

graphs_available = process_group_of is not None
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


def _in_graph(
    request: Request,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """out and lse by the op; `options` are the ops' options."""
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
    dout, _ = as_kernels_take(dout, None, out)
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


# --------------------------------------------------------------------------------------- attention
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
            results = core.forward(q, k, v, options)
        ctx.core = core
        save(ctx, dict(enumerate(results)), options)
        return results[-2], results[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        options = saved(ctx)
        results = tuple(options.pop(i) for i in [*options] if isinstance(i, int))
        dout, _ = as_kernels_take(dout, None, results[-2])
        with below_in_place():
            dq, dk, dv, dsink = ctx.core.backward(results, dout, dlse, options)
        return None, None, dq, dk, dv, dsink


class ContextOptions(TypedDict, total=False):
    """The keyword arguments of `attention`, except return_lse."""

    group: Group
    method: str
    transport: str
    layout: str
    seqlen: int | None
    cu_seqlens: Tensor | Sequence[int] | None
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sink: Tensor | None
    deterministic: bool | None
    variant: str


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ContextOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[ContextOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[ContextOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    are the whole sequence's on one device, up to rounding.

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
        method: "all_gather", "ring", "ulysses", or "auto" for the one of the shortest time by the
            model of `flash_ext.integrations.distributed.cost`.
        transport: "collectives" of the group's backend; "copy_engines", copies between the GPUs of
            one host that leave the SMs to the kernels beside them; or "auto" for copies if they
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
            group, like the gradient of every parameter.
        return_lse: return lse too.

    Returns:
        out (B, rows, Hq, Dv) in q's dtype, or (rows, Hq, Dv) with cu_seqlens; with return_lse the
        pair (out, lse), lse (B, Hq, rows) or (Hq, rows) in float32 (float64 for float64).

    Raises:
        ValueError: an argument is wrong, or the ranks disagree on shapes, dtypes or options: raised
            on every rank, at the first call of a new signature, naming what differs. New documents
            are no new signature: an error of this rank's is raised here, and that they are
            not the same on all ranks some calls later; at once with FLASH_EXT_DEBUG=1 in the
            environment, which waits for the other ranks.
        RuntimeError: a transfer failed or timed out; the message names it.

    Examples:
        >>> from flash_ext.integrations import distributed as cp
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)  # this rank's 8 rows of the sequence
        >>> cp.attention(q, k, v, causal=True).shape
        torch.Size([2, 8, 4, 16])
    """
    require_tensors(q=q, k=k, v=v)
    in_graph = (is_compiling() or not ops.is_real(q)) and graphs_available
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
        out, lse = _in_graph(request, group, q, k, v, cu_seqlens, options)
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


# ----------------------------------------------------------------------------------------- batches
# Cutting a batch for the ranks and joining it again: inputs, labels and position ids.

_F = TypeVar("_F", bound=Callable[..., Any])


def _outside_graphs(function: _F) -> _F:
    """A call breaks a compiler's graph, instead of an error within it."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def _shards(
    group: Group, seqlen: int, layout: str, cu_seqlens: Tensor | Sequence[int] | None
) -> tuple[Groups, Sharding]:
    groups, documents = groups_of(group), on_host(cu_seqlens)
    if documents is not None:
        require_documents(documents, seqlen)
    return groups, shards_of(groups, seqlen, layout, documents)


@_outside_graphs
def shard(
    x: Tensor,
    dim: int = 1,
    *,
    group: Group = None,
    layout: str = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole: inputs, labels, …

    Args:
        x: any tensor; dimension `dim` runs over the S rows of the whole sequence. Labels are cut
            the same way: shift them before.
        dim: that dimension; 0 for packed sequences (S, …).
        group, layout, cu_seqlens: as in `attention`. cu_seqlens counts only with
            layout="document_zigzag".

    Returns:
        The tensor of this rank's rows, differentiable; a view where they are one piece.

    Examples:
        >>> from flash_ext.integrations import distributed as cp
        >>> tokens = torch.arange(16).view(2, 8)
        >>> cp.shard(tokens).shape  # of a group of one rank
        torch.Size([2, 8])
    """
    groups, shards = _shards(group, x.shape[dim], layout, cu_seqlens)
    return shards.of_rank(x, groups.rank, dim)


@_outside_graphs
def unshard(
    x: Tensor,
    dim: int = 1,
    *,
    group: Group = None,
    layout: str = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The whole tensor, on every rank, from every rank's rows: the inverse of `shard`.

    Args:
        x: this rank's rows along `dim`.
        dim, group, layout, seqlen, cu_seqlens: as in `shard` and `attention`.

    Returns:
        The tensor of S rows. It has no gradient.

    Raises:
        ValueError: x does not have this rank's number of rows.

    Examples:
        >>> from flash_ext.integrations import distributed as cp
        >>> tokens = torch.arange(16).view(2, 8)
        >>> torch.equal(cp.unshard(cp.shard(tokens)), tokens)
        True
    """
    groups = groups_of(group)
    documents = on_host(cu_seqlens)
    if seqlen is None:
        seqlen = documents[-1] if documents else x.shape[dim] * groups.ranks
    groups, shards = _shards(group, seqlen, layout, documents)
    rows = shards.lengths[groups.rank]
    if x.shape[dim] != rows:
        refuse(f"x's dimension {dim}", f"this rank's {rows} rows of {seqlen}", x.shape[dim])
    x = x.detach().movedim(dim, 0)
    outer = outer_of(groups, shards)
    if groups.within is not None:
        of_group = outer.lengths[dist.get_rank(groups.across)]
        inner = sharding(of_group, groups.within_size, "contiguous")
        x = Collectives(groups.within, inner).gather_rows(x, "all-gather of rows").wait()
    x = Collectives(groups.across, outer).gather_rows(x, "all-gather of rows").wait()
    return x.movedim(0, dim)


@_outside_graphs
def position_ids(
    seqlen: int,
    *,
    group: Group = None,
    layout: str = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions of this rank's rows, int64 (rows): for rotary or learned embeddings.

    Args:
        seqlen: S, of the whole sequence.
        group, layout: as in `attention`.
        cu_seqlens: with these, positions count from the start of each row's document.
        device: of the result.

    Examples:
        >>> from flash_ext.integrations import distributed as cp
        >>> cp.position_ids(4)  # of a group of one rank
        tensor([0, 1, 2, 3])
    """
    groups, shards = _shards(group, seqlen, layout, cu_seqlens)
    place = HOST if device is None else torch.device(device)
    return shards.positions(groups.rank, on_host(cu_seqlens), place)
