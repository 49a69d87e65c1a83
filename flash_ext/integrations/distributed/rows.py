"""Tensors of rows: copies at full speed, sums of parts, and tensors side by side.

A method has tensors (B, rows, H, ...); what travels is a block (rows, B, H, ...) each, so that
consecutive rows are consecutive bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .sharding import Span

Rows = tuple[Tensor, ...]
"""Tensors (B, rows, H, ...) that travel together: the same rows, and maybe unequal shapes."""

Parts = Sequence[tuple[Span, Rows]]
"""Gradients of some rows each: the rows, and tensors (B, those rows, H, D)."""

_WIDE = (torch.complex128, torch.int64, torch.int32)
"""Types of 16, 8 and 4 bytes, in which elements are copied several at once."""


def _fits(x: Tensor, size: int) -> bool:
    """Whether x can be seen as elements of so many bytes."""
    if x.dim() == 0 or x.stride(-1) != 1:
        return False
    counts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(count * x.element_size() % size == 0 for count in counts)


def _widened(out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both, of one dtype, as elements of 16 bytes, or of as many as fit."""
    for wide in _WIDE:
        size = wide.itemsize
        if size > x.element_size() and _fits(out, size) and _fits(x, size):
            return out.view(wide), x.view(wide)
    return out, x


def copy(out: Tensor, x: Tensor) -> None:
    """out[...] = x. Torch copies strided tensors element by element: here elements of 16 bytes."""
    if out.dtype == x.dtype and not (out.is_contiguous() and x.is_contiguous()):
        out, x = _widened(out, x)
    out.copy_(x)


def pick(out: Tensor, x: Tensor, index: Tensor) -> None:
    """out[i] = x[index[i]], whole rows of one dtype: one kernel, however they are scattered."""
    if out.numel() > 0:
        out, x = _widened(out, x)
        torch.index_select(x, 0, index, out=out)


def sections(x: Tensor, spans: Sequence[Span]) -> Iterator[tuple[Tensor, Span]]:
    """Spans of x (S, …) as views, and where their rows are if one span lies after the other. Two
    of equal length, as in a zigzag, are one view (2, rows, …): so they are one kernel's work."""
    if len(spans) == 2 and spans[0][1] - spans[0][0] == spans[1][1] - spans[1][0]:
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


def total(parts: Parts, into: Rows) -> None:
    """The sums of parts, in the tensors' dtype: every row is written once, if with zeros.

    Args:
        parts: of any rows; where several have a row their sum is rounded at each addition.
        into: tensors (B, rows, H, D).
    """
    rows = into[0].shape[1]
    edges = sorted({0, rows, *itertools.chain.from_iterable(span for span, _ in parts)})
    for a, b in itertools.pairwise(edges):
        here = [(span[0], tensors) for span, tensors in parts if span[0] <= a and b <= span[1]]
        for i, out in enumerate(x[:, a:b] for x in into):
            pieces = [tensors[i][:, a - first : b - first] for first, tensors in here]
            if not pieces:
                out.zero_()
            elif len(pieces) == 1:
                copy(out, pieces[0])
            else:
                torch.add(pieces[0], pieces[1], out=out)
                for piece in pieces[2:]:
                    out += piece


def add_up(parts: Tensor, out: Tensor) -> None:
    """out[...] = the sum over the first dimension, in float32 (float64), in a fixed order, rounded
    once: one pass over memory."""
    if parts.shape[0] == 2:
        torch.add(parts[0], parts[1], out=out)
    else:
        torch.sum(parts, 0, out=out)
