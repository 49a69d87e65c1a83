"""`flash_ext.Mask`: which keys each query sees, as lists of blocks on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from . import mask_parts as parts
from .cpu.tile_mask import FULL, PARTIAL, by_query_heads, dense_mask, kinds_of_runs
from .mask_parts import Intervals
from .ops.checks import INTEGERS, Pair, refuse, require_ints, require_pair, require_tensors
from .ops.mask import (
    blocks_of,
    mask_from_blocks,
    mask_from_dense,
    mask_from_intervals,
    mask_from_kinds,
)
from .ops.options import MASK_BLOCK, MASK_OPTIONS
from .ops.torch_private import base_of, ordinary_tensors, register_pytree, version

_Lists = tuple[Tensor, Tensor]
_Tiles = tuple[Tensor, Tensor, Tensor]


def _version(x: Tensor) -> object:
    """Tensors of inference mode have none: a write to them is not noticed."""
    return None if x.is_inference() else version(x)


def _changing(device: torch.device) -> bool:
    """Whether a graph is being made: results belong to it, and are not kept."""
    return is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Which keys each query sees: for `flash_ext.attention(q, k, v, mask=…)`.

    Kernels compute only the blocks of 128 queries by 128 keys that are visible, in whole or in
    part. All heads share one mask, or each head of K and V, or each query head has its own. Making
    a mask, combining two with `&`, `|` and `~`, and using one never wait for the device. Make it
    once for all layers and steps that share it: it keeps what calls derive from it.

    Masks of intervals (`intervals`, `documents`, `prefix`, `sinks`) need memory linear in the
    tokens, and so does `blocks` with blocks of 128 (beside its lists). Others hold a bit for each
    pair of query and key.

    Two such linear masks combine by `&` to a linear mask if one of them has one interval a query
    (`causal` and `window` have one), by `|` if both have one; `~` needs one. Other combinations
    pass through a dense bool tensor, for a moment.

    A CUDA graph reads the tensors of the mask at each replay: `copy_` gives them new contents.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 8, 4, 16)
        >>> ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
        >>> mask = flash_ext.Mask.documents(ids, causal=True)
        >>> mask
        Mask(1 × 1 × 8 × 8, intervals, cpu)
        >>> flash_ext.attention(q, k, v, mask=mask).shape
        torch.Size([1, 8, 4, 16])
    """

    kv_tiles: Tensor
    """int32: the blocks of keys that each block of queries sees; the ops' mask_kv_tiles."""

    q_tiles: Tensor
    """int32: the blocks of queries that see each block of keys; the ops' mask_q_tiles."""

    words: Tensor
    """int32: what the queries of a block see in part: intervals or bits; the ops' mask_words."""

    seqlen_q: int
    seqlen_k: int

    per_query: int = 0
    """How many intervals a query has; 0: bits."""

    listed: bool = False
    """Whether blocks are hidden that intervals show."""

    kept: dict[Any, Any] = field(default_factory=dict, init=False)
    """What was derived from the mask."""

    # --- Constructors ---

    @staticmethod
    def dense(visible: Tensor, *, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Mask:
        """Of a bool tensor, True where the query sees the key, in one pass over it.

        Args:
            visible: (B or 1, Hq, Hk or 1, Sq or 1, Sk or 1); leading dimensions may be missing.
            seqlen_q, seqlen_k: Sq and Sk where visible has 1.

        Examples:
            >>> flash_ext.Mask.dense(torch.ones(3, 5, dtype=torch.bool).tril())
            Mask(1 × 1 × 3 × 5, bits, cpu)
        """
        require_tensors(visible=visible)
        if visible.dtype != torch.bool or not 2 <= visible.dim() <= 4:
            wanted = "bool of shape (B or 1, Hq, Hk or 1, Sq or 1, Sk or 1)"
            refuse("visible", wanted, f"{visible.dtype} of shape {tuple(visible.shape)}")
        visible = visible[(None,) * (4 - visible.dim())]
        given = zip((seqlen_q, seqlen_k), visible.shape[2:], strict=True)
        rows, keys = (found if size is None else size for size, found in given)
        if visible.shape[2] not in (1, rows) or visible.shape[3] not in (1, keys):
            wanted = f"1 or {(rows, keys)} in the last dimensions"
            refuse("visible", wanted, tuple(visible.shape))
        tiles: _Tiles = mask_from_dense(visible.expand(-1, -1, rows, keys))
        return Mask(*tiles, rows, keys)

    @staticmethod
    def intervals(begin: Tensor, end: Tensor, seqlen_k: int) -> Mask:
        """Query i sees the keys from begin[i] to end[i] − 1, of one or two such intervals.

        Args:
            begin, end: integers: (Sq), (Sq, 1 or 2), (B or 1, Hq, Hk or 1, Sq) or (B or 1, Hq,
                Hk or 1, Sq, 1 or 2). An interval that ends where it begins, or before, is empty;
                what lies outside of 0 to Sk is cut off.
            seqlen_k: Sk.

        Examples:
            >>> begin, end = torch.tensor([0, 0, 2]), torch.tensor([1, 2, 4])
            >>> flash_ext.Mask.intervals(begin, end, seqlen_k=4).to_dense()[0, 0].int()
            tensor([[1, 0, 0, 0],
                    [1, 1, 0, 0],
                    [0, 0, 1, 1]], dtype=torch.int32)
        """
        require_tensors(begin=begin, end=end)
        for name, x in (("begin", begin), ("end", end)):
            fits = 1 <= x.dim() <= 4 and (x.dim() % 2 == 1 or x.shape[-1] in (1, 2))
            if not fits or x.dtype not in INTEGERS:
                wanted = "integers of shape (Sq), (Sq, 1 or 2), (B, Hq, Sq) or (B, Hq, Sq, 1 or 2)"
                refuse(name, wanted, f"{x.dtype} of shape {tuple(x.shape)}")
        if begin.shape != end.shape or begin.device != end.device:
            got = f"{tuple(end.shape)} on {end.device}"
            refuse("end", f"like begin, {tuple(begin.shape)} on {begin.device}", got)
        edges = torch.stack((begin, end), -1)
        edges = edges.flatten(-2) if begin.dim() % 2 == 0 else edges
        if edges.dtype != torch.int32:
            edges = edges.long().clamp(-(2**31), 2**31 - 1).to(torch.int32)
        count = edges.shape[-1] // 2
        edges = F.pad(edges[(None,) * (4 - edges.dim())], (0, 4 - 2 * count))
        tiles: _Tiles = mask_from_intervals(edges, seqlen_k)
        return Mask(*tiles, edges.shape[2], seqlen_k, count)

    @staticmethod
    def documents(
        ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        seqlen: int | None = None,
        causal: bool = False,
        window: Pair = (-1, -1),
        prefix: int | Tensor = 0,
    ) -> Mask:
        """Documents one after the other: a query sees keys of its document.

        Args:
            ids: integers (S) or (B, S): each stretch of equal ones is a document. A negative one is
                padding, which sees nothing and is seen by nothing.
            cu_seqlens: int32 (n + 1), in place of ids: document d has the tokens cu_seqlens[d] to
                cu_seqlens[d + 1] − 1 of `seqlen`; the tokens after the last see nothing.
            causal, window: as of `flash_ext.attention`, within each document.
            prefix: every query sees this many first keys of its document, whatever causal and
                window say (prefix-LM); with cu_seqlens also a tensor (n), a number for each.

        Examples:
            >>> mask = flash_ext.Mask.documents(torch.tensor([7, 7, 7, 9]), causal=True, prefix=2)
            >>> mask.to_dense()[0, 0].int()
            tensor([[1, 1, 0, 0],
                    [1, 1, 0, 0],
                    [1, 1, 1, 0],
                    [0, 0, 0, 1]], dtype=torch.int32)
        """
        if (ids is None) == (cu_seqlens is None):
            refuse("ids or cu_seqlens", "given, one of them", "none" if ids is None else "both")
        sides = _window(causal, window)
        if cu_seqlens is not None:
            if seqlen is None:
                refuse("seqlen", "given with cu_seqlens: how many tokens there are", None)
            require_ints("cu_seqlens", cu_seqlens, ("n + 1",), cu_seqlens)
            count = cu_seqlens.numel() - 1
            parts.check_offsets(cu_seqlens, seqlen)
            if isinstance(prefix, Tensor) and prefix.shape != (count,):
                refuse("prefix", f"an int or of shape ({count},)", tuple(prefix.shape))
            offsets, sizes = (cu_seqlens, cu_seqlens), (seqlen, seqlen)
            return _of_documents(sizes, sides, prefix, cu_seqlens.device, offsets, name="prefix")
        require_tensors(ids=ids)
        assert ids is not None
        if ids.dim() not in (1, 2) or ids.dtype not in INTEGERS:
            got = f"{ids.dtype} of shape {tuple(ids.shape)}"
            refuse("ids", "integers of shape (S) or (B, S)", got)
        if isinstance(prefix, Tensor):
            refuse("prefix", "an int with ids", "a tensor")
        if seqlen not in (None, ids.shape[-1]):
            refuse("seqlen", f"None with ids, or {ids.shape[-1]}", seqlen)
        ids = ids if ids.dtype == torch.int32 else ids.long()
        ids = ids if ids.dim() == 2 else ids[None]
        sizes = ids.shape[1], ids.shape[1]
        return _of_documents(sizes, sides, prefix, ids.device, ids=ids, name="prefix")

    @staticmethod
    def prefix(
        n: int | Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Mask:
        """Causal, but every query sees the first n keys (prefix-LM).

        Args:
            n: a number, or a tensor (B): one for each batch element.
            seqlen_q, seqlen_k: Sq and Sk; None is Sq.
            device: of the mask; None is n's, or the default device.

        Examples:
            >>> flash_ext.Mask.prefix(2, 3).to_dense()[0, 0].int()
            tensor([[1, 1, 0],
                    [1, 1, 0],
                    [1, 1, 1]], dtype=torch.int32)
        """
        sizes = seqlen_q, seqlen_q if seqlen_k is None else seqlen_k
        return _of_documents(sizes, (-1, 0), n, device)

    @staticmethod
    def sinks(
        n: int | Tensor,
        window: Pair,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Mask:
        """A window, beside which the first n keys stay visible (StreamingLLM).

        A window whose right side is limited limits the first keys too: with (w, 0) no query sees a
        key after itself. The other arguments are as of `prefix`.

        Examples:
            >>> flash_ext.Mask.sinks(1, (1, 0), 4).to_dense()[0, 0].int()
            tensor([[1, 0, 0, 0],
                    [1, 1, 0, 0],
                    [1, 1, 1, 0],
                    [1, 0, 1, 1]], dtype=torch.int32)
        """
        sizes = seqlen_q, seqlen_q if seqlen_k is None else seqlen_k
        sides = require_pair("window", window)
        return _of_documents(sizes, sides, n, device, first_in_window=True)

    @staticmethod
    def blocks(
        index: Tensor, count: Tensor, seqlen_q: int, seqlen_k: int, *, block: int = MASK_BLOCK
    ) -> Mask:
        """Block-sparse: for each block of queries the blocks of keys that it sees.

        Args:
            index: integers (B or 1, Hq, Hk or 1, ⌈Sq / block⌉, n): blocks of keys, in any order;
                only the first `count` of them count.
            count: integers (B or 1, Hq, Hk or 1, ⌈Sq / block⌉).
            seqlen_q, seqlen_k: Sq and Sk.
            block: 128 or 64, the queries and the keys of a block.

        Examples:
            >>> index, count = torch.tensor([[[[2, 0], [1, 7]]]]), torch.tensor([[[2, 1]]])
            >>> mask = flash_ext.Mask.blocks(index, count, 256, 384)
            >>> print(mask.plot())
            █·█
            ·█·
        """
        require_tensors(index=index, count=count)
        if block not in (64, MASK_BLOCK):
            refuse("block", "128 or 64", block)
        rows, columns = -(-seqlen_q // block), -(-seqlen_k // block)
        if index.dim() != 4 or index.shape[2] != rows or index.dtype not in INTEGERS:
            wanted = f"integers of shape (B or 1, Hq, Hk or 1, ⌈Sq / block⌉ = {rows}, n)"
            refuse("index", wanted, f"{index.dtype} of shape {tuple(index.shape)}")
        if count.shape != index.shape[:3] or count.device != index.device:
            wanted = f"of shape {tuple(index.shape[:3])} on {index.device}"
            refuse("count", wanted, f"{tuple(count.shape)} on {count.device}")
        return _of_blocks(parts.listed_blocks(index, count, columns), seqlen_q, seqlen_k, block)

    @staticmethod
    def tree(parents: Tensor, n: int | Tensor = 0, *, seqlen_k: int | None = None) -> Mask:
        """A tree of drafted tokens after n keys of a cache: each sees the cache, its ancestors and
        itself (speculative decoding).

        Args:
            parents: integers (T) or (B, T): the parent of each token; −1: none. Any order.
            n: the keys before token 0's, a number or a tensor (B).
            seqlen_k: Sk; None is n + T. A tensor n needs it.

        Examples:
            >>> flash_ext.Mask.tree(torch.tensor([-1, 0, 0, 2]), n=1).to_dense()[0, 0].int()
            tensor([[1, 1, 0, 0, 0],
                    [1, 1, 1, 0, 0],
                    [1, 1, 0, 1, 0],
                    [1, 1, 0, 1, 1]], dtype=torch.int32)
        """
        require_tensors(parents=parents)
        if parents.dim() not in (1, 2) or parents.dtype not in INTEGERS:
            got = f"{parents.dtype} of shape {tuple(parents.shape)}"
            refuse("parents", "integers of shape (T) or (B, T)", got)
        if seqlen_k is None:
            if isinstance(n, Tensor):
                refuse("seqlen_k", "given with a tensor n", None)
            seqlen_k = n + parents.shape[-1]
        parts.check_tree(parents, n, seqlen_k)
        rows, device = parents.shape[-1], parents.device
        node = torch.arange(rows, device=device)
        seen = (node == node[:, None]) | (node == parents.unsqueeze(-1))  # (T, T) or (B, T, T)
        for _ in range(max(rows - 1, 0).bit_length()):  # ancestors twice as far each time
            seen = (seen.float() @ seen.float()) > 0
        drafted = torch.arange(seqlen_k, device=device).view(1, 1, -1)
        drafted = drafted - (n.view(-1, 1, 1) if isinstance(n, Tensor) else n)  # (B or 1, 1, Sk)
        batch = max(drafted.shape[0], len(parents) if parents.dim() == 2 else 1)
        drafted, seen = drafted.expand(batch, rows, -1), seen.expand(batch, -1, -1)
        of_tree = seen.gather(2, drafted.clamp(0, max(rows - 1, 0)))
        return Mask.dense(((drafted < 0) | ((drafted < rows) & of_tree))[:, None])

    @staticmethod
    def from_block_mask(block_mask: Any) -> Mask:
        """Of a BlockMask of torch.nn.attention.flex_attention, of any block size.

        Its full blocks are taken as they are. Its mask_mod is evaluated once, here, and kept as
        bits. A BlockMask without one, of blocks of 128, needs no bits.
        """
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        if not isinstance(block_mask, BlockMask):
            refuse("block_mask", "a BlockMask", f"a value of type {type(block_mask).__name__}")
        _, _, seqlen_q, seqlen_k = block_mask.shape
        rows, columns = block_mask.BLOCK_SIZE
        blocks = -(-seqlen_k // columns)
        shown = parts.listed_blocks(block_mask.kv_indices, block_mask.kv_num_blocks, blocks)
        full = torch.zeros_like(shown)
        if block_mask.full_kv_indices is not None and block_mask.full_kv_num_blocks is not None:
            found = block_mask.full_kv_indices, block_mask.full_kv_num_blocks
            full = parts.listed_blocks(*found, blocks)
            shown = shown | full
        if block_mask.mask_mod is noop_mask and (rows, columns) == (MASK_BLOCK, MASK_BLOCK):
            return _of_blocks(shown[:, :, : blocks_of(seqlen_q)], seqlen_q, seqlen_k)
        sizes = seqlen_q, seqlen_k
        kinds, words = parts.evaluated(block_mask.mask_mod, full, shown, (rows, columns), sizes)
        lists: _Lists = mask_from_kinds(kinds)
        return Mask(*lists, words, *sizes)

    # --- What a mask says ---

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B or 1, Hq, Hk or 1, Sq, Sk)."""
        return self.kv_tiles.shape[0], self.kv_tiles.shape[1], self.seqlen_q, self.seqlen_k

    @property
    def device(self) -> torch.device:
        """Where the mask is."""
        return self.kv_tiles.device

    def __repr__(self) -> str:
        kind = "blocks" if self.listed else "intervals" if self.per_query else "bits"
        return f"Mask({' × '.join(map(str, self.shape))}, {kind}, {self.device})"

    def to_dense(self) -> Tensor:
        """The mask as a bool tensor of `shape`, which is kept: read-only."""
        sizes = self.seqlen_q, self.seqlen_k
        return self.keep("dense", (), lambda: dense_mask(self.kv_tiles, self.words, sizes))  # type: ignore[no-any-return]

    def density(self) -> Tensor:
        """The share of the blocks that kernels compute, 1 of a full mask: a float32 of no
        dimensions."""
        blocks = self.kv_tiles.shape[2] * self.q_tiles.shape[2]
        return self.kv_tiles[..., :2].sum((-2, -1)).float().mean() / max(blocks, 1)

    def plot(self, batch: int = 0, head: int = 0) -> str:
        """A picture of the blocks: █ is full, ▒ visible in part, · hidden. Waits for the device."""
        signs = {FULL: "█", PARTIAL: "▒"}
        rows = self.kinds()[batch, head].tolist()
        return "\n".join("".join(signs.get(kind, "·") for kind in row) for row in rows)

    # --- Combinations ---

    def __and__(self, other: Mask) -> Mask:
        self._require_like(other)
        if not other.per_query:
            return Mask.dense(self.to_dense() & other.to_dense())
        return self._limited(other)

    def __or__(self, other: Mask) -> Mask:
        self._require_like(other)
        if not (self.per_query == other.per_query == 1) or self.listed or other.listed:
            return Mask.dense(self.to_dense() | other.to_dense())
        return self._like([*self._intervals(), *other._intervals()])

    def __invert__(self) -> Mask:
        if self.per_query != 1 or self.listed:
            return Mask.dense(~self.to_dense())
        ((begin, end),) = self._intervals()
        return self._like([(0, begin), (end, self.seqlen_k)])

    def kinds(self) -> Tensor:
        """The kind of each block, uint8 (B or 1, Hq, Hk or 1, ⌈Sq / 128⌉, ⌈Sk / 128⌉): 0 is hidden,
        1 full and 2 visible in part."""
        return kinds_of_runs(self.kv_tiles, blocks_of(self.seqlen_k))

    def _like(self, intervals: Intervals) -> Mask:
        return _of_intervals(intervals, self.seqlen_q, self.seqlen_k, self.device)

    def _intervals(self) -> Intervals:
        begin_0, end_0, begin_1, end_1 = self.words[:, :, : self.seqlen_q].unbind(-1)
        return [(begin_0, end_0), (begin_1, end_1)][: self.per_query]

    def _shown(self) -> Tensor:
        """As bool, by intervals alone."""
        return parts.shown_by(self._intervals(), self.seqlen_k, self.device)

    def _limited(self, other: Mask) -> Mask:
        """The part that a mask of intervals shows as well."""
        if self.per_query * other.per_query not in (1, 2):
            shown = other.to_dense() if other.listed else other._shown()
            return Mask.dense(self.to_dense() & shown)
        both = [
            (parts.larger(begin, begin_2), parts.smaller(end, end_2))
            for begin, end in self._intervals()
            for begin_2, end_2 in other._intervals()
        ]
        listed = [x.kinds() > 0 for x in (self, other) if x.listed]
        if not listed:
            return self._like(both)
        words = parts.as_tensor(both, self.seqlen_q, self.device)
        matrices = torch.broadcast_shapes(*(x.shape[:2] for x in (words, *listed)))
        kinds = (listed[0] & listed[-1]).to(torch.uint8).expand(*matrices, -1, -1)
        tiles: _Tiles = mask_from_blocks(kinds, words)
        return Mask(*tiles, self.seqlen_q, self.seqlen_k, len(both), True)

    def _require_like(self, other: Mask) -> None:
        if not isinstance(other, Mask):
            refuse("the other mask", "a Mask", f"a value of type {type(other).__name__}")
        pairs = zip(self.shape[:2], other.shape[:2], strict=True)
        fits = all(a == b or 1 in (a, b) for a, b in pairs) and self.shape[2:] == other.shape[2:]
        if not fits or self.device != other.device:
            refuse("the other mask", f"like {self}", other)

    # --- For calls ---

    def to(self, device: torch.device | str) -> Mask:
        """The mask on a device."""
        tensors = (self.kv_tiles, self.q_tiles, self.words)
        waits = torch.device(device).type == "cpu"  # whose reader is the host
        kv_tiles, q_tiles, words = (x.to(device, non_blocking=not waits) for x in tensors)
        return replace(self, kv_tiles=kv_tiles, q_tiles=q_tiles, words=words)

    def copy_(self, other: Mask) -> Mask:
        """Write the contents of another mask of the same sizes and kind into this one, for CUDA
        graphs that read it."""
        alike = isinstance(other, Mask) and _flatten(self)[1] == _flatten(other)[1]
        pairs = list(zip(_flatten(self)[0], _flatten(other)[0], strict=True)) if alike else []
        if not alike or any(a.shape != b.shape for a, b in pairs):
            refuse("the other mask", f"of the same kind and shape as {self}", other)
        for mine, given in pairs:
            mine.copy_(given)
        self.kept.clear()
        return self

    def options(self) -> dict[str, Tensor]:
        """As options of the ops."""
        tensors = (self.kv_tiles, self.q_tiles, self.words)
        return dict(zip(MASK_OPTIONS, tensors, strict=True))

    def keep(self, key: Any, sources: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        """What was made of the mask and other tensors, made again if one of them was written to.

        Within a graph it is made in the graph.
        """
        if _changing(self.device):
            return make()
        of_mask = (self.kv_tiles, self.words)
        versions = tuple(_version(x) for x in (*of_mask, *sources))
        references, found, value = self.kept.get(key, ((), None, None))
        same = len(references) == len(sources) and all(
            x() is y for x, y in zip(references, sources, strict=True)
        )
        if not same or found != versions:
            with ordinary_tensors():
                value = make()
            self.kept[key] = tuple(map(ref, sources)), versions, value
        return value

    def folded(self, causal: bool, window: Pair) -> Mask:
        """The mask with causal and window, bottom-right as everywhere, within it."""
        left, right = _window(causal, window)
        if left < 0 and right < 0:
            return self

        def make() -> Mask:
            sizes = self.seqlen_q, self.seqlen_k
            return self._limited(_of_documents(sizes, (left, right), 0, self.device))

        return self.keep(("band", left, right), (), make)  # type: ignore[no-any-return]

    def within(self, cu_seqlens: tuple[Tensor, Tensor], causal: bool, window: Pair) -> Mask:
        """The mask, over packed positions, within sequences: for q and for k."""
        sides = _window(causal, window)

        def make() -> Mask:
            sizes = self.seqlen_q, self.seqlen_k
            return self._limited(_of_documents(sizes, sides, 0, self.device, cu_seqlens))

        return self.keep(("documents", *sides), cu_seqlens, make)  # type: ignore[no-any-return]

    def with_bias(self, bias: Tensor) -> Mask:
        """What a bool bias, of four dimensions, shows as well."""

        def make() -> Mask:
            return Mask.dense(by_query_heads(self.to_dense(), bias.shape[1]) & bias)

        return self.keep("bias", (bias,), make)  # type: ignore[no-any-return]

    @staticmethod
    def of_bias(bias: Tensor, seqlen_q: int, seqlen_k: int, window: Pair = (-1, -1)) -> Mask:
        """The mask of a bool bias, with a window: made once while the tensor lives and is not
        written to. Views of one tensor that show the same of it have one mask."""
        left, right = require_pair("window", window)

        def make() -> Mask:
            visible = bias[(None,) * (4 - bias.dim())].expand(-1, -1, seqlen_q, seqlen_k)
            if left >= 0 or right >= 0:
                sizes = seqlen_q, seqlen_k
                visible = visible & _of_documents(sizes, (left, right), 0, bias.device)._shown()
            return Mask.dense(visible)

        if _changing(bias.device) or bias.is_inference():
            return make()
        place = bias.storage_offset(), bias.shape, bias.stride()
        key, now, base = (*place, seqlen_q, seqlen_k, left, right), version(bias), base_of(bias)
        then, kept = _of_biases.get(base, (now, {}))
        if then != now:
            kept = {}
        if key not in kept:
            if len(kept) == _MOST_OF_A_BIAS:
                kept.pop(next(iter(kept)))
            with ordinary_tensors():
                kept[key] = make()
            _of_biases[base] = now, kept
        return kept[key]  # type: ignore[no-any-return]


_of_biases = WeakTensorKeyDictionary()
_MOST_OF_A_BIAS = 8
"""Masks of a bias that are kept: a model may show ever more of one tensor."""


def _flatten(mask: Mask) -> tuple[list[Tensor], tuple[Any, ...]]:
    sizes = mask.seqlen_q, mask.seqlen_k, mask.per_query, mask.listed
    return [mask.kv_tiles, mask.q_tiles, mask.words], sizes


def _unflatten(tensors: Any, sizes: tuple[Any, ...]) -> Mask:
    return Mask(*tensors, *sizes)


register_pytree(Mask, _flatten, _unflatten, ("kv_tiles", "q_tiles", "words"))


def _window(causal: bool, window: Pair) -> tuple[int, int]:
    left, right = require_pair("window", window)
    return left, 0 if causal else right


def _of_intervals(intervals: Intervals, seqlen_q: int, seqlen_k: int, device: torch.device) -> Mask:
    tiles: _Tiles = mask_from_intervals(parts.as_tensor(intervals, seqlen_q, device), seqlen_k)
    return Mask(*tiles, seqlen_q, seqlen_k, len(intervals))


def _of_blocks(shown: Tensor, seqlen_q: int, seqlen_k: int, block: int = MASK_BLOCK) -> Mask:
    if block != MASK_BLOCK:
        kinds, words = parts.half_blocks(shown, seqlen_q, seqlen_k)
        lists: _Lists = mask_from_kinds(kinds)
        return Mask(*lists, words, seqlen_q, seqlen_k)
    every = parts.as_tensor([(0, seqlen_k)], seqlen_q, shown.device)
    tiles: _Tiles = mask_from_blocks(shown.to(torch.uint8), every)
    return Mask(*tiles, seqlen_q, seqlen_k, 1, True)


def _of_documents(sizes: tuple[int, int], *arguments: Any, **more: Any) -> Mask:
    tiles, per_query = parts.of_documents(sizes, *arguments, **more)
    return Mask(*tiles, *sizes, per_query)
