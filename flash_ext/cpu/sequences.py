"""Sequences of different lengths: where they are in packed and padded tensors.

The CPU kernels take equal lengths, and so run one length after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from ..ops.options import Options


@dataclass(frozen=True)
class Span:
    """Sequences of equal lengths, adjacent in the batch: a box of the (B, S, H, D) tensors.

    Packed tensors (total, H, D) take part as one batch element, (1, total, H, D).
    """

    sequences: slice
    """Their indices b, 0 <= b < B."""
    batch: slice
    queries: slice
    keys: slice
    """Those in use."""
    pages: Tensor | None = None
    """Of one sequence: the numbers of the pages that hold its keys. None: k and v have no pages."""

    @property
    def lengths(self) -> tuple[int, int]:
        """Sq and Sk of each of them."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def of_queries(self, x: Tensor) -> Tensor:
        """Their part of a tensor with q's rows, a view."""
        return x[self.batch, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        """Their part of a tensor with k's rows; a view, or the rows of their pages."""
        if self.pages is None:
            return x[self.batch, self.keys]
        return x[self.pages].flatten(0, 1)[None, self.keys]

    def slopes_of(self, alibi_slopes: Tensor) -> Tensor:
        """Their part of (Hq) or (B, Hq)."""
        return alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[self.sequences]

    def descale_of(self, descale: Tensor) -> Tensor:
        """Their part of one number, (B, Hk), or (B, H, blocks or channels)."""
        return descale if descale.dim() < 2 else descale[self.sequences]

    def bias_of(self, bias: Tensor) -> Tensor:
        """Their part of (B|1, Hq|1, Sq|1, Sk|1), a view; it may be shorter than they are."""
        positions = map(slice, self.lengths)
        parts = zip(bias.shape, (self.sequences, slice(None), *positions), strict=True)
        return bias[tuple(slice(None) if size == 1 else part for size, part in parts)]


def spans(q: Tensor, k: Tensor, options: Options) -> Iterator[Span]:
    """All sequences of q (B, Sq, Hq, D) and k (B, Sk, Hk, D), in as few spans as possible.

    With cu_seqlens, for q and for k, these are packed. With a page table k is (pages, page size,
    Hk, D). seqused_k is as in `flash_ext.attention`.
    """
    if options.page_table is not None:
        yield from _paged_spans(q, k, options)
        return
    cu_seqlens, seqused_k = options.cu_seqlens, options.seqused_k
    batch, queries, keys = slice(0, q.shape[0]), slice(0, q.shape[1]), slice(0, k.shape[1])
    if cu_seqlens is None and seqused_k is None:
        yield Span(batch, batch, queries, keys)
        return
    if cu_seqlens is None:
        places = [(slice(b, b + 1), queries, keys) for b in range(q.shape[0])]
    else:
        rows = ([slice(*edges) for edges in pairwise(x.tolist())] for x in cu_seqlens)
        places = [(batch, *both) for both in zip(*rows, strict=True)]
    used = None if seqused_k is None else seqused_k.tolist()
    for b, (element, queries, keys) in enumerate(places):
        if used is not None:
            keys = slice(keys.start, min(keys.start + max(used[b], 0), keys.stop))
        yield Span(slice(b, b + 1), element, queries, keys)


def _paged_spans(q: Tensor, k: Tensor, options: Options) -> Iterator[Span]:
    assert options.page_table is not None and options.seqused_k is not None
    size = k.shape[1]
    edges = options.cu_seqlens_q
    packed = None if edges is None else list(pairwise(edges.tolist()))
    used = zip(options.page_table, options.seqused_k.tolist(), strict=True)
    for b, (table, keys) in enumerate(used):
        element, queries = slice(b, b + 1), slice(0, q.shape[1])
        if packed is not None:
            element, queries = slice(0, 1), slice(*packed[b])
        pages = table[: -(-keys // size)].long()
        yield Span(slice(b, b + 1), element, queries, slice(0, keys), pages)
