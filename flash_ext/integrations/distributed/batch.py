"""Cutting a batch for the ranks and joining it again: inputs, labels and position ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.checks import refuse
from .methods import Groups, outer_of
from .on_device import HOST
from .request import Group, groups_of, on_host, require_documents, shards_of
from .sharding import Sharding, sharding
from .transport import Collectives

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
    """
    groups, shards = _shards(group, seqlen, layout, cu_seqlens)
    place = HOST if device is None else torch.device(device)
    return shards.positions(groups.rank, on_host(cu_seqlens), place)
