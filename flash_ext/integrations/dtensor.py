"""flash_ext on `torch.distributed.tensor.DTensor`: each rank computes its sequences and heads.

    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v))  # (B, S, H, D): heads
    out = flash_ext.attention(q, k, v, causal=True)  # Shard(2) too; nothing is communicated

Nothing need be imported or registered: the first call with a DTensor does it. (Exception: code that
calls an op itself in `torch.inference_mode`, or is compiled, must import this module first.)

A dimension of the mesh splits the batch or the heads, as in the first of q, k and v that is split;
or the sequence, where q is Shard(1): then it computes by `flash_ext.integrations.distributed`, with
K and V gathered in pieces while kernels run, and out, its lse and all gradients are split alike.
That is for self-attention without a bias, dropout, seqused_k, FP8 or a graph of torch.compile.
(DTensor's split is contiguous: under a causal mask the last rank has the most work. A zigzag split
is balanced: `flash_ext.integrations.distributed.attention`.)

The other tensors follow, options too, and are redistributed where their placement differs. Key
heads are split with the query heads that read them, so their number is a multiple of the number of
ranks, or 1: then every rank has that head, and its gradient is a partial sum. Everything else is
computed on every rank: heads that do not divide, and other splits, which are gathered.

A plain tensor among the arguments must be the same on every rank. Only `rng_state` may differ:
ranks that compute the same use the first one's state, so replicated results are the same on
each, however their generators were seeded. Each part has its own dropout mask, so dropout differs
from the mask of the whole on one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.library import register_torch_dispatch

from .. import ops
from ..ops.checks import head_dim_v
from ..ops.options import ABOUT, MASK_OPTIONS, QK_8_BITS, BackwardTensors, dim_of
from .distributed.algorithms import Core
from .distributed.methods import Groups, build, unsupported_reason
from .distributed.packing import Mask
from .distributed.sharding import Sharding, sharding

Role = Literal["batch", "heads", "sequence"] | None
"""What a dimension of the mesh splits. None: nothing."""


class _Layout:
    """The dimensions of batch and heads in each tensor of one call, and what the mesh splits."""

    def __init__(
        self, mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> None:
        self.mesh, self.packed = mesh, "cu_seqlens_q" in options
        self.pages = options.get("page_table") is not None
        self.v_transposed = options.get("v_transposed", False)
        self.roles: list[Role] = [self._role(i, q, k, v) for i in range(mesh.ndim)]
        self._split_sequence(q, k, options)
        splits = math.prod(mesh.size(i) for i, r in enumerate(self.roles) if r == "heads")
        key_heads = k.shape[-2]
        if key_heads > 1 and key_heads % splits != 0:
            self.roles = [None if role == "heads" else role for role in self.roles]

    def _role(self, mesh_dim: int, *tensors: Tensor) -> Role:
        for name, x in zip("qkv", tensors, strict=True):
            placement = x.placements[mesh_dim] if isinstance(x, DTensor) else None
            for role in ("batch", "heads"):
                dim = self._dim("v" if name == "v" else "q", 4 - self.packed, role)
                if dim is not None and placement == Shard(dim) and tensors[0].shape[dim] > 1:
                    return role
        return None

    def _split_sequence(self, q: Tensor, k: Tensor, options: dict[str, Any]) -> None:
        """The role of the first dimension of the mesh that splits q's rows, if that can be."""
        self.sequence: tuple[Groups, Sharding, Mask] | None = None
        free = (i for i, role in enumerate(self.roles) if role is None)
        if not isinstance(q, DTensor) or not _may_split_sequence(q, k, options):
            return
        dims = [i for i in free if q.placements[i] == Shard(1)]
        if not dims:
            return
        groups = Groups(self.mesh.get_group(dims[0]))
        shards = sharding(q.shape[1], groups.ranks, "contiguous")
        window = options.get("window_left", -1), options.get("window_right", -1)
        mask = Mask.of(options.get("causal", False), window, None)
        if unsupported_reason("all_gather", groups, q, k, shards, mask, options) is None:
            self.roles[dims[0]] = "sequence"
            self.sequence = groups, shards, mask

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Core | None:
        """What computes the parts where the sequence is split."""
        if self.sequence is None:
            return None
        return build("all_gather", *self.sequence, q, k, v)

    def _dim(self, name: str, dims: int, role: str) -> int | None:
        """The dimension that is split, of a tensor with `dims` dimensions, or None."""
        if self.packed and role == "batch":  # the sequences follow one another
            return None
        if name in ABOUT:
            return dim_of(name, dims, role)
        if self.pages and name in ("k", "v"):
            return 2 if role == "heads" else None
        if role == "batch":
            return 0
        if role == "sequence":
            return 2 if name in ("lse", "dlse") else 1
        before_rows = name in ("lse", "dlse") or (name == "v" and self.v_transposed)
        return (1 if before_rows else 2) - self.packed

    def placements(self, name: str, x: Tensor, broadcast: Placement) -> list[Placement]:
        """Of x, which is q or an option. `broadcast` where one value serves all that is split."""

        def place(role: Role) -> Placement:
            if role is None:
                return Replicate()
            dim = self._dim(name, x.dim(), role)
            return broadcast if dim is None or x.shape[dim] == 1 else Shard(dim)

        return [place(role) for role in self.roles]

    def local(self, name: str, x: Any) -> Any:
        """This rank's part of an argument, as the ops take it."""
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, DTensor):
            everywhere = [Replicate()] * self.mesh.ndim
            x = DTensor.from_local(x, self.mesh, everywhere, run_check=False)
        placements = self.placements(name, x, Replicate())
        # Detached: otherwise torch 2.11 would call detach_ on the result, which DTensors do not
        # have.
        part = x.detach().redistribute(self.mesh, placements).to_local()
        if name == "rng_state":
            part = self._of_first_rank(part)
            return torch.stack([part[0], part[1] + self._part()])
        rows = name in ("q", "k", "v", "out", "dout", "bias")
        return part if rows and part.stride(-1) == 1 else part.contiguous()

    def _of_first_rank(self, x: Tensor) -> Tensor:
        """x as the first rank has it, along each dimension of the mesh that splits nothing.

        Ranks that compute the same must drop the same, but each has its own generator.
        """
        dims = range(self.mesh.ndim)
        each = x.expand(*(1 for _ in dims), *x.shape)
        every = DTensor.from_local(each, self.mesh, [Shard(i) for i in dims], run_check=False)
        placements = [Replicate() if self.roles[i] is None else Shard(i) for i in dims]
        return every.redistribute(self.mesh, placements).to_local()[(0,) * len(dims)]

    def _part(self) -> int:
        """The index of this rank's part of the whole."""
        number = 0
        for index, (role, here) in enumerate(
            zip(self.roles, self.mesh.get_coordinate() or (), strict=True)
        ):
            if role is not None:
                number = number * self.mesh.size(index) + here
        return number

    def whole(self, part: Tensor, shape: Sequence[int], placements: list[Placement]) -> Tensor:
        """The contiguous DTensor whose part on this rank is `part`."""
        shape = torch.Size(shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )


_OF_THE_WHOLE = {
    *("bias", "seqused_k", "page_table", "rng_state"),
    *("q_descale", "k_descale", "v_descale"),
    *("cu_seqlens_q", "cu_seqlens_k"),
    *MASK_OPTIONS,
}
"""Options that a split sequence does not have."""

_OF_MASKS = ("causal", "window_left", "window_right")


def _may_split_sequence(q: DTensor, k: Tensor, options: dict[str, Any]) -> bool:
    """Whether parts of the sequence can be computed where they are."""
    return (
        q.shape[1] == k.shape[1] > 1
        and k.dtype not in QK_8_BITS
        and options.keys().isdisjoint(_OF_THE_WHOLE)
        and ops.is_real(q.to_local())  # a compiler's graph cannot hold these communications
    )


def _mesh(tensors: Sequence[Any]) -> DeviceMesh:
    found = {x.device_mesh for x in tensors if isinstance(x, DTensor)}
    if len(found) != 1:
        raise ValueError(f"flash_ext: the DTensors must be on one mesh, got {found}")
    return found.pop()


def _without_masks(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name not in _OF_MASKS}


def _on_parts(op: Any, args: Any, options: dict[str, Any]) -> tuple[_Layout, Any]:
    """fwd or check of this rank's part: the layout of the call, and what the op returns."""
    q, k, v = args
    layout = _Layout(_mesh((*args, *options.values())), q, k, v, options)
    q, k, v = (layout.local(name, x) for name, x in zip("qkv", args, strict=True))
    local = {name: layout.local(name, x) for name, x in options.items()}
    core = layout.core(q, k, v) if op is ops.fwd else None
    if core is not None:
        return layout, core.forward(q, k, v, _without_masks(local))[-2:]
    return layout, op(q, k, v, **local)


def _check(cls: Any, op: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    with torch.no_grad():
        return _on_parts(op, args, kwargs or {})[1]


def _fwd(cls: Any, op: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    q, k, v = args
    with torch.no_grad():
        layout, (out, lse) = _on_parts(op, args, kwargs or {})
        *batch, rows, heads, _ = q.shape
        lse_shape = (*batch, heads, rows)
        like_q = layout.placements("q", q, Replicate())
        like_lse = layout.placements("lse", torch.empty(lse_shape, device="meta"), Replicate())
        return (
            layout.whole(out, (*q.shape[:-1], head_dim_v(v, kwargs or {})), like_q),
            layout.whole(lse, lse_shape, like_lse),
        )


def _bwd(cls: Any, op: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    x, options = BackwardTensors(*args), kwargs or {}
    with torch.no_grad():
        layout = _Layout(_mesh((*args, *options.values())), x.q, x.k, x.v, options)
        parts = BackwardTensors(*(layout.local(name, y) for name, y in x._asdict().items()))
        local = {name: layout.local(name, o) for name, o in options.items()}
        core = layout.core(parts.q, parts.k, parts.v)
        if core is None:
            gradients = op(*parts, **local)
        else:
            local.pop("need_dbias", None)
            dout, dlse, *saved = parts
            dq, dk, dv, dsink = core.backward(tuple(saved), dout, dlse, _without_masks(local))
            nothing = dq.new_empty(0)
            gradients = (dq, dk, dv, nothing, nothing if dsink is None else dsink)
        gradients_of: dict[str, Tensor | None] = {"q": x.q, "k": x.k, "v": x.v}
        gradients_of |= {name: options.get(name) for name in ("bias", "sink")}
        return tuple(
            layout.whole(part, part.shape, [Replicate()] * layout.mesh.ndim)
            if y is None or part.dim() != y.dim()  # no gradient, (0,)
            else layout.whole(part, y.shape, layout.placements(name, y, Partial()))
            for part, (name, y) in zip(gradients, gradients_of.items(), strict=True)
        )


register_torch_dispatch(ops.check, DTensor, _check)
register_torch_dispatch(ops.fwd, DTensor, _fwd)
register_torch_dispatch(ops.bwd, DTensor, _bwd)
