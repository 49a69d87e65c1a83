"""Tensors of rows: copies at full speed, sums of parts, and tensors side by side.

A method has tensors (B, rows, H, ...); what travels is a block (rows, B, H, ...) each, so that
consecutive rows are consecutive bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ... import ops
from ...ops.checks import statistics_dtype
from ...ops.sum_rows import MOST_OUTS, MOST_PARTS
from .sharding import FEW_SPANS, Sharding, Span

AT_ONCE = 4
"""How many results of all rows are kept until they are added up, or more of some rows each."""


def many(kept: Sequence[int], rows: int) -> bool:
    """Whether so many rows are to be added up before another result of all `rows` is kept."""
    return len(kept) == MOST_PARTS or sum(kept) > (AT_ONCE - 1) * rows


Rows = tuple[Tensor, ...]
"""Tensors (B, rows, H, ...) that travel together: the same rows, and maybe unequal shapes."""

Parts = Sequence[tuple[Span, Rows]]
"""Gradients of some rows each: the rows, and tensors (B, those rows, H, D)."""

_WIDE = (torch.complex128, torch.int64, torch.int32)
"""Types of 16, 8 and 4 bytes, in which elements are copied several at once."""


def widest(*tensors: Tensor) -> torch.dtype:
    """Of elements of 16 bytes, or of as many as all of these, of one dtype, can be seen as."""
    numbers, dtype = 0, tensors[0].dtype
    for x in tensors:
        if x.dim() == 0 or x.stride(-1) != 1:
            return dtype
        for number in (x.shape[-1], int(x.storage_offset()), *x.stride()[:-1]):
            numbers |= number
    most = (numbers & -numbers) * dtype.itemsize  # the largest power of 2 that divides all bytes
    return next((wide for wide in _WIDE if dtype.itemsize < wide.itemsize <= most), dtype)


def _widened(out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both, of one dtype, as elements of 16 bytes, or of as many as fit."""
    wide = widest(out, x)
    return (out, x) if wide == x.dtype else (out.view(wide), x.view(wide))


def copy(out: Tensor, x: Tensor) -> None:
    """out[...] = x. Torch copies strided tensors element by element: here elements of 16 bytes."""
    if out.dtype == x.dtype and not (out.is_contiguous() and x.is_contiguous()):
        out, x = _widened(out, x)
    out.copy_(x)


def copy_to_all(outs: Sequence[Tensor], spans: Sequence[Span], x: Tensor) -> None:
    """Rows x (B, rows, H, D) to their spans of each of outs (S, B, H, D), which have the same
    strides and may be in the memory of other GPUs."""
    for places in zip(*(sections(out, spans) for out in outs), strict=True):
        part = x[:, slice(*places[0][1])]
        into = [place for place, _ in places]
        if into[0].dim() == 4:
            _to_all([place.transpose(0, 1) for place in into], part)
        else:  # two spans, which are a batch themselves
            for i, sequence in enumerate(part):
                _to_all([place[:, :, i] for place in into], sequence.unflatten(0, (2, -1)))


def _to_all(outs: Sequence[Tensor], x: Tensor) -> None:
    for i in range(0, len(outs), MOST_OUTS):
        ops.copy_rows(outs[i : i + MOST_OUTS], x)


def pick(out: Tensor, x: Tensor, index: Tensor) -> None:
    """out[i] = x[index[i]], whole rows of one dtype: one kernel, however they are scattered."""
    if out.numel() > 0:
        out, x = _widened(out, x)
        torch.index_select(x, 0, index, out=out)


def join(shards: Sharding, parts: Tensor) -> Tensor:
    """The whole sequence (S, …) from all ranks' rows (n, most, …), the rest being padding."""
    if shards.most_spans > FEW_SPANS:
        whole = parts.new_empty((shards.rows, *parts.shape[2:]))
        pick(whole, parts.flatten(0, 1), shards.orders(parts.device, padded=True)[1])
        return whole
    if shards.in_order and shards.rows == shards.ranks * shards.most:
        return parts.reshape(shards.rows, *parts.shape[2:])
    if shards.rows == 0:
        return parts.new_empty((0, *parts.shape[2:]))
    pieces = []
    for part, spans in zip(parts, shards.spans, strict=True):
        at = 0
        for a, b in spans:
            pieces.append((a, part[at : at + b - a]))
            at += b - a
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda x: x[0])])


def split(shards: Sharding, x: Tensor) -> Tensor:
    """All ranks' rows (n, most, …) of the whole sequence x (S, …), padded with anything."""
    whole = shards.rows == shards.ranks * shards.most
    shape = shards.ranks, shards.most, *x.shape[1:]
    if shards.most_spans > FEW_SPANS:
        found = x.new_empty((shards.ranks * shards.most, *x.shape[1:]))
        pick(found, x, shards.orders(x.device, padded=True)[0])
        return found.view(shape)
    if shards.in_order and whole:
        return x.view(shape)
    padding = None if whole else x.new_zeros((shards.most, *x.shape[1:]))
    parts = []
    for spans, length in zip(shards.spans, shards.lengths, strict=True):
        parts += [x[a:b] for a, b in spans]
        if padding is not None and length < shards.most:
            parts.append(padding[length:])
    return torch.cat(parts).view(shape)


def narrowed(x: Tensor, span: Span, dim: int = 0) -> Tensor:
    """Those rows of x; x itself if they are all of them, which costs the host less."""
    first, last = span
    return x if last - first == x.shape[dim] else x.narrow(dim, first, last - first)


def sections(x: Tensor, spans: Sequence[Span]) -> Iterator[tuple[Tensor, Span]]:
    """Spans of x (S, …) as views, and where their rows are if one span lies after the other. Two
    of equal length, as in a zigzag, are one view (2, rows, …): so they are one kernel's work."""
    if len(spans) == 2 and spans[0] < spans[1] and len({b - a for a, b in spans}) == 1:
        (a, b), (c, _) = spans
        strides = ((c - a) * x.stride(0), *x.stride())
        shape = (2, b - a, *x.shape[1:])
        yield x.as_strided(shape, strides, x.storage_offset() + a * x.stride(0)), (0, 2 * (b - a))
        return
    at = 0
    for a, b in spans:
        yield x[a:b], (at, at + b - a)
        at += b - a


def side_by_side(tensors: Rows, most: int) -> Tensor:
    """(most, B, H, ΣD), contiguous, from tensors (B, rows, H, D); rows from `rows` on are zeros."""
    first = tensors[0]
    dims = [x.shape[-1] for x in tensors]
    found = first.new_empty((most, first.shape[0], first.shape[2], sum(dims)))
    found[first.shape[1] :].zero_()
    for x, place in zip(tensors, found[: first.shape[1]].split(dims, -1), strict=True):
        copy(place, x.transpose(0, 1))
    return found


def apart(x: Tensor, dims: Sequence[int]) -> Rows:
    """Views (B, rows, H, D) of what `side_by_side` has put together."""
    return tuple(torch.split(x.transpose(0, 1), list(dims), dim=-1))


def total(parts: Parts, into: Rows, index: Tensor | None = None) -> None:
    """The sums of parts, formed in float32 (float64) in their order and rounded to the tensors'
    dtype: every row is written once, if with zeros, in one pass over memory.

    Args:
        parts: of any rows of the sequence.
        into: tensors (B, rows, H, D); without an index each may be the first part of all rows.
        index: int32 (rows), the rows of the sequence that `into` has; None: those from 0 on.
    """
    for i, out in enumerate(into):
        firsts = [span[0] for span, _ in parts]
        tensors = [x[i] for _, x in parts]
        if len(tensors) > MOST_PARTS:
            head = torch.empty(
                (out.shape[0], max(span[1] for span, _ in parts), *out.shape[2:]),
                dtype=statistics_dtype(out.dtype),
                device=out.device,
            )
            while len(tensors) > MOST_PARTS:
                ops.sum_rows(head, tensors[:MOST_PARTS], firsts[:MOST_PARTS])
                tensors, firsts = [head, *tensors[MOST_PARTS:]], [0, *firsts[MOST_PARTS:]]
        ops.sum_rows(out, tensors, firsts, index)


def add_in_place(parts: Parts, into: Rows) -> None:
    """As `total`, where the first part, if there is one, has been written to its place."""
    first, last = parts[0][0] if parts else (0, 0)
    for x in into:
        if first > 0:
            x[:, :first].zero_()
        if last < x.shape[1]:
            x[:, last:].zero_()
    for span, part in parts[1:]:
        here = tuple(x[:, slice(*span)] for x in into)
        whole = (0, span[1] - span[0])
        total([(whole, here), (whole, part)], here)


def add_up(parts: Tensor, out: Tensor) -> None:
    """out (rows, B, H, D) = the sum over the first dimension of parts (n, rows, B, H, D)."""
    whole = (0, out.shape[0])
    total([(whole, (x.transpose(0, 1),)) for x in parts], (out.transpose(0, 1),))


class Sum:
    """Gradients (B, rows, H, D) of several steps: added up in one pass, but a few at a time, so
    that not all of many are kept."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._parts: list[tuple[Span, Rows]] = []

    def add(self, part: Tensor, first: int = 0) -> None:
        """A gradient of the rows from `first` on. It must not be written again."""
        if many([last - first for (first, last), _ in self._parts], self._like.shape[1]):
            sums = torch.empty_like(self._like, dtype=statistics_dtype(self._like.dtype))
            total(self._parts, (sums,))
            self._parts = [((0, sums.shape[1]), (sums,))]
        self._parts.append(((first, first + part.shape[1]), (part,)))

    def found(self) -> Tensor:
        """The sum, in the dtype of `like`; a part itself if it is the only one."""
        if len(self._parts) == 1:
            ((first, last), (part,)) = self._parts[0]
            if (first, last) == (0, self._like.shape[1]) and part.dtype == self._like.dtype:
                return part
        out = torch.empty_like(self._like)
        total(self._parts, (out,))
        return out
