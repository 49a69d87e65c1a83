"""`flash_ext.Mask`: which keys each query sees, as lists of blocks on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from ._mask_tiles import from_kinds, mask_from_dense, mask_from_intervals, pack_bits
from .cpu.tile_mask import FULL, PARTIAL, dense_mask, kinds_of_runs
from .ops.checks import Pair, refuse, require_pair, require_tensors
from .ops.options import MASK_BLOCK, MASK_OPTIONS
from .ops.torch_private import ordinary_tensors, register_pytree, version

_EVALUATED = 1 << 26
"""Pairs of a query and a key at which a mask_mod is evaluated at a time."""


def _blocks_of(length: int) -> int:
    return -(-length // MASK_BLOCK)


def _version(x: Tensor) -> object:
    """Tensors of inference mode have none: a write to them is not noticed."""
    return None if x.is_inference() else version(x)


def _changing(device: torch.device) -> bool:
    """Whether what is computed now is part of a graph, which computes it again, and not kept."""
    return is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Which keys each query sees: for `flash_ext.attention(q, k, v, mask=…)`.

    Kernels compute only the blocks of 128 queries by 128 keys that are visible, in whole or in
    part. A mask lies on the device. Making one, combining two with `&`, `|` and `~`, and using one
    never wait for the device. Make it once for all layers and steps that share it: what calls
    derive from it, as a mask with `causal` beside it, is kept on it.

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

    per_query: Literal[0, 1, 2] = 0
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
            visible: (B or 1, Hq or 1, Sq or 1, Sk or 1); leading dimensions may be missing.
            seqlen_q, seqlen_k: Sq and Sk where visible has 1.

        Examples:
            >>> flash_ext.Mask.dense(torch.ones(3, 5, dtype=torch.bool).tril())
            Mask(1 × 1 × 3 × 5, bits, cpu)
        """
        require_tensors(visible=visible)
        if visible.dtype != torch.bool or not 2 <= visible.dim() <= 4:
            wanted = "bool of shape (B or 1, Hq or 1, Sq or 1, Sk or 1)"
            refuse("visible", wanted, f"{visible.dtype} of shape {tuple(visible.shape)}")
        visible = visible[(None,) * (4 - visible.dim())]
        given = zip((seqlen_q, seqlen_k), visible.shape[2:], strict=True)
        rows, keys = (found if size is None else size for size, found in given)
        if visible.shape[2] not in (1, rows) or visible.shape[3] not in (1, keys):
            wanted = f"1 or {(rows, keys)} in the last dimensions"
            refuse("visible", wanted, tuple(visible.shape))
        return Mask(*mask_from_dense(visible.expand(-1, -1, rows, keys)), rows, keys)

    @staticmethod
    def intervals(begin: Tensor, end: Tensor, seqlen_k: int) -> Mask:
        """Query i sees the keys from begin[i] to end[i] − 1, of one or two such intervals.

        Args:
            begin, end: integers: (Sq), (Sq, 1 or 2), (B or 1, Hq or 1, Sq) or (B or 1, Hq or 1, Sq,
                1 or 2). An interval that ends where it begins, or before, is empty; what lies
                outside of 0 to Sk is cut off.
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
            if not fits or x.is_floating_point() or x.dtype == torch.bool:
                wanted = "integers of shape (Sq), (Sq, 1 or 2), (B, Hq, Sq) or (B, Hq, Sq, 1 or 2)"
                refuse(name, wanted, f"{x.dtype} of shape {tuple(x.shape)}")
        if begin.shape != end.shape or begin.device != end.device:
            got = f"{tuple(end.shape)} on {end.device}"
            refuse("end", f"like begin, {tuple(begin.shape)} on {begin.device}", got)
        if begin.dim() % 2 == 1:
            begin, end = begin.unsqueeze(-1), end.unsqueeze(-1)
        if begin.dim() == 2:
            begin, end = begin[None, None], end[None, None]
        return _of_intervals(begin, end, seqlen_k)

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
        """Documents one after the other: a query sees keys of its own document.

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
            refuse("ids or cu_seqlens", "given, one of them", "both" if ids is not None else None)
        if cu_seqlens is not None:
            if seqlen is None:
                refuse("seqlen", "given with cu_seqlens: how many tokens there are", None)
            return _packed((cu_seqlens, cu_seqlens), (seqlen, seqlen), causal, window, prefix)
        assert ids is not None
        require_tensors(ids=ids)
        if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
            got = f"{ids.dtype} of shape {tuple(ids.shape)}"
            refuse("ids", "integers of shape (S) or (B, S)", got)
        if isinstance(prefix, Tensor):
            refuse("prefix", "an int with ids", "a tensor")
        ids = ids.reshape(-1, 1, ids.shape[-1])
        rows = ids.shape[-1]
        token = torch.arange(rows, dtype=torch.int32, device=ids.device)
        new = F.pad(ids[..., 1:] != ids[..., :-1], (1, 0), value=True)
        begin = torch.where(new, token, 0).cummax(-1).values
        last = F.pad(new[..., 1:], (0, 1), value=True)
        end = torch.where(last, token + 1, rows).flip(-1).cummin(-1).values.flip(-1)
        end = torch.where(ids < 0, begin, end)
        return _of_intervals(*_seen(begin, end, token, causal, window, prefix), rows)

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
        query, keys = _positions(n, seqlen_q, seqlen_k, device)
        n = n.view(-1, 1, 1).to(query.device) if isinstance(n, Tensor) else n
        return _of_intervals(*_seen(*_every(query, keys), query, True, (-1, -1), n), keys)

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
        query, keys = _positions(n, seqlen_q, seqlen_k, device)
        n = n.view(-1, 1, 1).to(query.device) if isinstance(n, Tensor) else n
        left, right = require_pair("window", window)
        begin, end = _banded(*_every(query, keys), query, left, right)
        first = torch.clamp(end, max=n)
        begin = torch.stack((torch.zeros_like(first), torch.maximum(begin, first)), -1)
        return _of_intervals(begin, torch.stack((first, end.expand_as(first)), -1), keys)

    @staticmethod
    def blocks(
        index: Tensor, count: Tensor, seqlen_q: int, seqlen_k: int, *, block: int = MASK_BLOCK
    ) -> Mask:
        """Block-sparse: for each block of queries the blocks of keys that it sees.

        Args:
            index: integers (B or 1, Hq or 1, ⌈Sq / block⌉, n): blocks of keys, in any order; only
                the first `count` of them count.
            count: integers (B or 1, Hq or 1, ⌈Sq / block⌉).
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
        if index.dim() != 4 or index.shape[2] != rows or index.dtype.is_floating_point:
            wanted = f"integers of shape (B or 1, Hq or 1, ⌈Sq / block⌉ = {rows}, n)"
            refuse("index", wanted, f"{index.dtype} of shape {tuple(index.shape)}")
        if count.shape != index.shape[:3] or count.device != index.device:
            wanted = f"of shape {tuple(index.shape[:3])} on {index.device}"
            refuse("count", wanted, f"{tuple(count.shape)} on {count.device}")
        shown = _shown(index, count, columns)
        if block == MASK_BLOCK:
            end = count.new_full((*count.shape[:2], seqlen_q, 1), seqlen_k)
            mask = _of_intervals(torch.zeros_like(end), end, seqlen_k)
            kinds = kinds_of_runs(mask.kv_tiles, columns)
            return _with_kinds(mask, torch.where(shown, kinds, 0), listed=True)
        return _of_half_blocks(shown, seqlen_q, seqlen_k)

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
        if parents.dim() not in (1, 2) or parents.is_floating_point():
            got = f"{parents.dtype} of shape {tuple(parents.shape)}"
            refuse("parents", "integers of shape (T) or (B, T)", got)
        if seqlen_k is None:
            if isinstance(n, Tensor):
                refuse("seqlen_k", "given with a tensor n", None)
            seqlen_k = n + parents.shape[-1]
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
        listed = _shown(block_mask.kv_indices, block_mask.kv_num_blocks, blocks)
        full = torch.zeros_like(listed)
        if block_mask.full_kv_indices is not None and block_mask.full_kv_num_blocks is not None:
            found = block_mask.full_kv_indices, block_mask.full_kv_num_blocks
            full = _shown(*found, blocks)
        if block_mask.mask_mod is noop_mask and (rows, columns) == (MASK_BLOCK, MASK_BLOCK):
            shown = (listed | full)[:, :, : _blocks_of(seqlen_q)]
            index = torch.arange(blocks, device=shown.device).expand(shown.shape)
            index = torch.where(shown, index, blocks).sort(-1).values
            return Mask.blocks(index, shown.sum(-1), seqlen_q, seqlen_k)
        function, sizes = block_mask.mask_mod, (seqlen_q, seqlen_k)
        return _evaluated(function, full, listed | full, (rows, columns), sizes)

    # --- What a mask says ---

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B or 1, Hq or 1, Sq, Sk)."""
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
        blocks = self.kv_tiles.shape[2] * _blocks_of(self.seqlen_k)
        return self.kv_tiles[..., :2].sum((-2, -1)).float().mean() / max(blocks, 1)

    def plot(self, batch: int = 0, head: int = 0) -> str:
        """A picture of the blocks: █ is full, ▒ visible in part, · hidden. Waits for the device."""
        kinds = kinds_of_runs(self.kv_tiles[batch, head], _blocks_of(self.seqlen_k))
        signs = {FULL: "█", PARTIAL: "▒"}
        return "\n".join("".join(signs.get(kind, "·") for kind in row) for row in kinds.tolist())

    # --- Combinations ---

    def __and__(self, other: Mask) -> Mask:
        self._require_like(other)
        n = self.per_query * other.per_query
        if not 1 <= n <= 2:
            return Mask.dense(self.to_dense() & other.to_dense())
        (begin, end), (begin_2, end_2) = self._intervals(), other._intervals()
        begin = torch.maximum(begin.unsqueeze(-1), begin_2.unsqueeze(-2)).flatten(-2)
        end = torch.minimum(end.unsqueeze(-1), end_2.unsqueeze(-2)).flatten(-2)
        mask = _of_intervals(begin, end, self.seqlen_k)
        listed = [x for x in (self, other) if x.listed]
        if not listed:
            return mask
        blocks = _blocks_of(self.seqlen_k)
        kinds = kinds_of_runs(mask.kv_tiles, blocks)
        for x in listed:
            kinds = torch.where(kinds_of_runs(x.kv_tiles, blocks) > 0, kinds, 0)
        return _with_kinds(mask, kinds, listed=True)

    def __or__(self, other: Mask) -> Mask:
        self._require_like(other)
        if not (self.per_query == other.per_query == 1) or self.listed or other.listed:
            return Mask.dense(self.to_dense() | other.to_dense())
        pairs = zip(self._intervals(), other._intervals(), strict=True)
        begin, end = (torch.cat(torch.broadcast_tensors(*pair), -1) for pair in pairs)
        return _of_intervals(begin, end, self.seqlen_k)

    def __invert__(self) -> Mask:
        if self.per_query != 1 or self.listed:
            return Mask.dense(~self.to_dense())
        begin, end = self._intervals()
        begin, end = F.pad(end, (1, 0)), F.pad(begin, (0, 1), value=self.seqlen_k)
        return _of_intervals(begin, end, self.seqlen_k)

    def _intervals(self) -> tuple[Tensor, Tensor]:
        """begin and end, (…, Sq, `per_query`)."""
        pairs = self.words[:, :, : self.seqlen_q].unflatten(-1, (2, 2))[..., : self.per_query, :]
        return pairs[..., 0], pairs[..., 1]

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
        kv_tiles, q_tiles, words = (x.to(device, non_blocking=True) for x in tensors)
        return replace(self, kv_tiles=kv_tiles, q_tiles=q_tiles, words=words)

    def copy_(self, other: Mask) -> Mask:
        """Write the contents of another mask of the same sizes and kind into this one, for CUDA
        graphs that read it."""
        for name in ("kv_tiles", "q_tiles", "words"):
            if getattr(self, name).shape != getattr(other, name).shape:
                refuse("the other mask", f"of the same kind and shape as {self}", other)
            getattr(self, name).copy_(getattr(other, name))
        if (self.per_query, self.listed) != (other.per_query, other.listed):
            refuse("the other mask", f"of the same kind and shape as {self}", other)
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
        left, right = require_pair("window", window)
        right = 0 if causal else right
        if left < 0 and right < 0:
            return self

        def make() -> Mask:
            query, keys = _positions(0, self.seqlen_q, self.seqlen_k, self.device)
            band = _seen(*_every(query, keys), query, causal, window, 0)
            return self & _of_intervals(*band, keys)

        return self.keep(("band", left, right), (), make)  # type: ignore[no-any-return]

    def within(self, cu_seqlens: tuple[Tensor, Tensor], causal: bool, window: Pair) -> Mask:
        """The mask, over packed positions, within sequences: for q and for k."""
        left, right = require_pair("window", window)

        def make() -> Mask:
            sizes = self.seqlen_q, self.seqlen_k
            return self & _packed(cu_seqlens, sizes, causal, (left, right), 0)

        key = ("documents", causal, left, right)
        return self.keep(key, cu_seqlens, make)  # type: ignore[no-any-return]

    @staticmethod
    def of_bias(bias: Tensor, seqlen_q: int, seqlen_k: int, window: Pair = (-1, -1)) -> Mask:
        """The mask of a bool bias, with a window: made once while the tensor lives and is not
        written to."""
        left, right = require_pair("window", window)

        def make() -> Mask:
            visible = bias[(None,) * (4 - bias.dim())].expand(-1, -1, seqlen_q, seqlen_k)
            if left >= 0 or right >= 0:
                query, keys = _positions(0, seqlen_q, seqlen_k, bias.device)
                key = torch.arange(keys, device=bias.device)
                low, high = _banded(*_every(query, keys), query, left, right)
                visible = visible & (key >= low.unsqueeze(-1)) & (key < high.unsqueeze(-1))
            return Mask.dense(visible)

        if _changing(bias.device) or bias.is_inference():
            return make()
        kept = _of_biases.setdefault(bias, {})
        key, now = (seqlen_q, seqlen_k, left, right), version(bias)
        found = kept.get(key)
        if found is None or found[0] != now:
            with ordinary_tensors():
                found = kept[key] = now, make()
        return found[1]  # type: ignore[no-any-return]


_of_biases = WeakTensorKeyDictionary()


def _flatten(mask: Mask) -> tuple[list[Tensor], tuple[Any, ...]]:
    sizes = mask.seqlen_q, mask.seqlen_k, mask.per_query, mask.listed
    return [mask.kv_tiles, mask.q_tiles, mask.words], sizes


def _unflatten(tensors: Any, sizes: tuple[Any, ...]) -> Mask:
    return Mask(*tensors, *sizes)


register_pytree(Mask, _flatten, _unflatten, "flash_ext.Mask")


# --- Intervals: begin and end, int32, (…, Sq) ---


def _positions(
    n: int | Tensor, seqlen_q: int, seqlen_k: int | None, device: torch.device | str | None
) -> tuple[Tensor, int]:
    """The position among the keys of each query, the last being the last key's; and Sk."""
    if device is None:
        device = n.device if isinstance(n, Tensor) else torch.get_default_device()
    keys = seqlen_q if seqlen_k is None else seqlen_k
    return torch.arange(keys - seqlen_q, keys, dtype=torch.int32, device=device), keys


def _every(query: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Every key, (1, 1, 1)."""
    return query.new_zeros((1, 1, 1)), query.new_full((1, 1, 1), keys)


def _banded(
    begin: Tensor, end: Tensor, position: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """The part of [begin, end) within a window about each query's position."""
    begin, end, position = torch.broadcast_tensors(begin, end, position)
    if left >= 0:
        begin = torch.maximum(begin, position - left)
    if right >= 0:
        end = torch.minimum(end, position + (right + 1))
    return begin, end


def _seen(
    begin: Tensor,
    end: Tensor,
    position: Tensor,
    causal: bool,
    window: Pair,
    prefix: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """What a query sees of its document [begin, end): (…, Sq, 1 or 2)."""
    left, right = require_pair("window", window)
    low, high = _banded(begin, end, position, left, 0 if causal else right)
    if not isinstance(prefix, Tensor) and prefix <= 0:
        return low.unsqueeze(-1), high.unsqueeze(-1)
    first = torch.minimum(begin + prefix, end)
    begin, first, low, high = torch.broadcast_tensors(begin, first, low, high)
    if left < 0:
        return begin.unsqueeze(-1), torch.maximum(first, high).unsqueeze(-1)
    return torch.stack((begin, torch.maximum(low, first)), -1), torch.stack((first, high), -1)


def _packed(
    cu_seqlens: tuple[Tensor, Tensor],
    sizes: tuple[int, int],
    causal: bool,
    window: Pair,
    prefix: int | Tensor,
) -> Mask:
    """Packed sequences, bottom-right each: the offsets and the rows of q, and of k."""
    (cu_q, cu_k), (rows, keys) = cu_seqlens, sizes
    query = torch.arange(rows, dtype=torch.int32, device=cu_q.device)
    last = cu_q.shape[0] - 1
    stop = torch.searchsorted(cu_q, query, right=True).clamp(max=last)  # where the sequence ends
    # Those of a query after the last sequence are both the last: nothing.
    start = torch.where(query < cu_q[-1], stop - 1, last)
    begin, end = cu_k[start], cu_k[stop]
    if isinstance(prefix, Tensor):
        prefix = prefix.to(torch.int32)[start.clamp(max=last - 1)] if last else 0
    return _of_intervals(
        *_seen(begin, end, query + (end - cu_q[stop]), causal, window, prefix), keys
    )


def _of_intervals(begin: Tensor, end: Tensor, seqlen_k: int) -> Mask:
    """Of (…, Sq, 1 or 2), integers of any size."""
    begin, end = torch.broadcast_tensors(begin, end)
    begin, end = (x[(None,) * (4 - x.dim())] for x in (begin, end))
    if begin.dtype != torch.int32 or end.dtype != torch.int32:
        begin, end = (x.clamp(0, seqlen_k).to(torch.int32) for x in (begin, end))
    tensors = mask_from_intervals(begin, end, seqlen_k)
    per_query: Any = begin.shape[-1]
    return Mask(*tensors, begin.shape[2], seqlen_k, per_query)


# --- Blocks ---


def _shown(index: Tensor, count: Tensor, blocks: int) -> Tensor:
    """Which blocks are among the first `count` of a list, bool (…, blocks)."""
    used = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    used = used & (index >= 0) & (index < blocks)
    shown = torch.zeros((*index.shape[:-1], blocks + 1), dtype=torch.bool, device=index.device)
    return shown.scatter_(-1, index.long().masked_fill(~used, blocks), True)[..., :blocks]


def _with_kinds(mask: Mask, kinds: Tensor, listed: bool) -> Mask:
    """The mask with other blocks, (Bm, Hm, nQ, nK)."""
    kv_tiles, q_tiles = from_kinds(kinds)
    words = mask.words.expand(*kinds.shape[:2], *mask.words.shape[2:]).contiguous()
    return replace(mask, kv_tiles=kv_tiles, q_tiles=q_tiles, words=words, listed=listed)


def _of_half_blocks(shown: Tensor, seqlen_q: int, seqlen_k: int) -> Mask:
    """Of blocks of 64 by 64."""
    rows, columns = _blocks_of(seqlen_q), _blocks_of(seqlen_k)
    if shown.shape[2] % 2 == 1:  # a block that is not there does not make the other one partial
        shown = torch.cat((shown, shown[:, :, -1:]), 2)
    shown = F.pad(shown, (0, 2 * columns - shown.shape[3]))
    shown = shown.unflatten(3, (columns, 2)).unflatten(2, (rows, 2)).transpose(3, 4)
    kinds = torch.where(shown.flatten(-2).any(-1), PARTIAL, 0)
    kinds = torch.where(shown.flatten(-2).all(-1), FULL, kinds)
    # The keys 0 to 63 of a block are the low halves of its words.
    words = torch.where(shown[..., 0], 0xFFFF, 0) | torch.where(shown[..., 1], -0x10000, 0)
    words = words.to(torch.int32).repeat_interleave(64, -1).unsqueeze(-1).repeat_interleave(4, -1)
    if seqlen_k % MASK_BLOCK != 0:
        within = torch.arange(MASK_BLOCK, device=shown.device) < seqlen_k % MASK_BLOCK
        kinds[..., -1] = torch.where(kinds[..., -1] == 0, 0, PARTIAL)
        words[:, :, :, -1] &= pack_bits(within)
    return Mask(*from_kinds(kinds), words, seqlen_q, seqlen_k)


def _evaluated(
    mask_mod: Callable[..., Tensor],
    full: Tensor,
    shown: Tensor,
    block: tuple[int, int],
    sizes: tuple[int, int],
) -> Mask:
    """Of blocks (B, H, …) of any size, in full, or where mask_mod is true as well."""
    function: Callable[..., Tensor] = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        function = torch.vmap(function, in_dims=dims)
    function = torch.vmap(function, in_dims=(0, None, None, None))
    (batch, heads), (seqlen_q, seqlen_k), device = shown.shape[:2], sizes, shown.device
    b, h, keys = (torch.arange(n, device=device) for n in (batch, heads, seqlen_k))
    step = max(_EVALUATED // max(batch * heads * seqlen_k * MASK_BLOCK, 1), 1) * MASK_BLOCK
    parts = []
    for start in range(0, max(seqlen_q, 1), step):
        rows = torch.arange(start, min(start + step, seqlen_q), device=device)
        in_full, in_shown = (
            x[:, :, rows // block[0]][..., keys // block[1]] for x in (full, shown)
        )
        parts.append(mask_from_dense(in_full | (in_shown & function(b, h, rows, keys))))
    kv_tiles, words = (torch.cat([part[i] for part in parts], 2) for i in (0, 2))
    kinds = kinds_of_runs(kv_tiles, _blocks_of(seqlen_k))
    return Mask(*from_kinds(kinds), words, seqlen_q, seqlen_k)
