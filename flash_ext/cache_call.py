"""A call of attention to a cache: its checks, the keys that it sees, and what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .cpu.checks import check_offsets
from .ops.call import can_be_read
from .ops.checks import check_rows, refuse, require_ints, require_tensors
from .ops.options import FP8, QK_8_BITS


class Keys(NamedTuple):
    """The keys and values that queries see, as `torch.ops.flash_ext.fwd` takes them."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    seqused_k: Tensor | None

    def options(self) -> dict[str, Tensor]:
        """Of fwd."""
        given = {"page_table": self.page_table, "seqused_k": self.seqused_k}
        return {name: x for name, x in given.items() if x is not None}


class CacheCall(NamedTuple):
    """The arguments of `attention_with_cache`, which describes them, but for its options."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: int | Tensor | None = None
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    rotary_seqlens: Tensor | None = None

    @property
    def batch(self) -> int:
        """B."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        """The keys that a sequence can have."""
        pages = 1 if self.page_table is None else self.page_table.shape[1]
        return pages * self.k_cache.shape[1]

    @property
    def only_caches_have_8_bits(self) -> bool:
        """Whether q has more."""
        return self.k_cache.dtype in QK_8_BITS and self.q.dtype not in QK_8_BITS

    def check(self) -> None:
        """Refuse wrong tensors. The ops' own checks follow; they would name k and v, which mean
        other tensors to the caller."""
        q, packed = self.q, self.cu_seqlens_q is not None
        if self.cu_seqlens_q is not None:
            require_tensors(cu_seqlens_q=self.cu_seqlens_q)
            if self.cu_seqlens_q.dim() != 1 or self.cu_seqlens_q.shape[0] == 0:
                refuse("cu_seqlens_q", "of shape (batch + 1)", tuple(self.cu_seqlens_q.shape))
        rows = ("total_q",) if packed else ("batch", "seqlen_q")
        check_rows("q", q, (*rows, "heads_q", "head_dim"), q)
        self._check_caches()
        batch = self.batch
        for name, shape in (
            ("page_table", ("batch" if self.cache_batch_idx is not None else batch, "pages")),
            ("cache_batch_idx", (batch,)),
            ("cache_leftpad", (batch,)),
            ("cu_seqlens_k_new", (batch + 1,)),
            ("rotary_seqlens", (batch,)),
        ):
            if (x := getattr(self, name)) is not None:
                require_ints(name, x, shape, q)
        if self.page_table is not None and self.k_cache.shape[1] == 0:
            refuse("k_cache", "of pages with at least one row", tuple(self.k_cache.shape))
        self._check_new()
        if can_be_read(q):
            self._check_places()

    def _check_caches(self) -> None:
        q, k_cache = self.q, self.k_cache
        paged = self.page_table is not None
        rows: tuple[int | str, ...] = ("pages", "page_size") if paged else ("batch", "seqlen_k")
        rows = (*rows, "heads_k", q.shape[-1])
        require_tensors(k_cache=k_cache)
        dtype = k_cache.dtype if self.only_caches_have_8_bits else q.dtype
        for name, cache in (("k_cache", k_cache), ("v_cache", self.v_cache)):
            check_rows(name, cache, rows, q, dtype)
            rows = (*cache.shape[:3], "head_dim_v")
            dtype = FP8 if q.dtype == torch.int8 else dtype
            if not paged and self.cache_batch_idx is None and cache.shape[0] < self.batch:
                wanted = f"of a batch of at least {self.batch}, like q's"
                refuse(name, wanted, tuple(cache.shape))
            if cache.shape[-1] > 1 and cache.stride(-1) != 1:
                refuse(name, "contiguous in its last dimension", f"strides {cache.stride()}")

    def _check_new(self) -> None:
        q, k, v = self.q, self.k, self.v
        if (k is None) != (v is None):
            raise ValueError("flash_ext: k and v must be given together, got one of them")
        rotary = {name: getattr(self, name) for name in ("rotary_cos", "rotary_sin")}
        if k is None or v is None:
            for name in (*rotary, "rotary_seqlens", "cu_seqlens_k_new"):
                if getattr(self, name) is not None:
                    refuse(name, "None without k and v, which are written", "a tensor")
            return
        packed = self.cu_seqlens_k_new is not None
        rows: tuple[int | str, ...] = ("total_new",) if packed else (self.batch, "seqlen_new")
        require_tensors(k=k, v=v)
        quantized = self.only_caches_have_8_bits and k.dtype == q.dtype
        dtypes = (q.dtype, q.dtype) if quantized else (self.k_cache.dtype, self.v_cache.dtype)
        check_rows("k", k, (*rows, *self.k_cache.shape[2:]), q, dtypes[0])
        rows = k.shape[:-2]
        check_rows("v", v, (*rows, *self.v_cache.shape[2:]), q, dtypes[1])
        given = [name for name, x in rotary.items() if x is not None]
        if len(given) == 1:
            refuse("rotary_cos and rotary_sin", "given together", f"{given[0]} alone")
        if not given and self.rotary_seqlens is not None:
            refuse("rotary_seqlens", "None without rotary_cos", "a tensor")
        for name in given:
            require_tensors(**{name: rotary[name]})

    def _check_places(self) -> None:
        """Refuse tables and paddings with wrong numbers, which are at hand on a CPU."""
        index, leftpad = self.cache_batch_idx, self.cache_leftpad
        if index is not None:
            rows = (self.k_cache if self.page_table is None else self.page_table).shape[0]
            if not all(0 <= n < rows for n in index.tolist()):
                refuse("cache_batch_idx", f"0 to {rows - 1}", index.tolist())
        if leftpad is not None and not all(n >= 0 for n in leftpad.tolist()):
            refuse("cache_leftpad", "at least 0", leftpad.tolist())
        if self.cu_seqlens_k_new is not None and self.k is not None:
            check_offsets("cu_seqlens_k_new", self.cu_seqlens_k_new, self.k.shape[0])

    def new_keys(self) -> int | Tensor:
        """How many keys are written: of each sequence, or (B)."""
        if self.cu_seqlens_k_new is not None:
            return self.cu_seqlens_k_new.diff()
        return 0 if self.k is None else self.k.shape[1]

    def lengths(self) -> Tensor | None:
        """Check and return cache_seqlens as a contiguous int32 (B), with room for the new keys."""
        held, new, q = self.cache_seqlens, self.new_keys(), self.q
        if held is None:
            if self.k is not None:
                raise ValueError("flash_ext: cache_seqlens must be given with k and v, got None")
            return None
        if isinstance(held, Tensor):
            require_ints("cache_seqlens", held, (self.batch,), q)
        elif not isinstance(held, int | torch.SymInt):
            require_tensors(cache_seqlens=held)
        if isinstance(held, Tensor) and not can_be_read(held):
            return held.contiguous()
        readable = isinstance(new, int | torch.SymInt) or can_be_read(new)
        of_each = [held] * self.batch if not isinstance(held, Tensor) else held.tolist()
        if readable:
            news = new.tolist() if isinstance(new, Tensor) else [new] * self.batch
            for n, more in zip(of_each, news, strict=True):
                room = self.capacity - more
                if not 0 <= n <= room:
                    wanted = f"0 to {room}, of a cache of {self.capacity} for {more} new keys"
                    got = held.tolist() if isinstance(held, Tensor) else held
                    refuse("cache_seqlens", wanted, got)
        if isinstance(held, Tensor):
            return held.contiguous()
        return torch.full((self.batch,), held, dtype=torch.int32, device=q.device)

    def table(self) -> Tensor | None:
        """Where the keys of each sequence are: a dense cache with an index has one page for each of
        its batch elements. None: sequence b has page b alone."""
        table, index = self.page_table, self.cache_batch_idx
        if table is None:
            return None if index is None else index[:, None]
        if index is not None:
            table = table.index_select(0, index)
        return table if table.stride(-1) == 1 else table.contiguous()

    def keys(self, used: Tensor | None) -> Keys:
        """What queries see of sequences with this number of keys; None: all."""
        k, v, table, batch = self.k_cache, self.v_cache, self.table(), self.batch
        if table is None and self.cu_seqlens_q is None and self.cache_leftpad is None:
            return Keys(k[:batch], v[:batch], None, used)
        places: dict[str, Any] = {"dtype": torch.int32, "device": k.device}
        if table is None:
            table = torch.arange(batch, **places)[:, None]
        if used is None:
            used = torch.full((batch,), self.capacity, **places)
        if self.cache_leftpad is None:
            return Keys(k, v, table, used)
        # The keys after the padding, as pages of one key.
        size, columns = k.shape[1], table.shape[1]
        positions = torch.arange(columns * size, **places) + self.cache_leftpad[:, None]
        page = table.gather(1, (positions // size).clamp(max=columns - 1).long())
        k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (k, v))
        used = (used - self.cache_leftpad).clamp(min=0)
        return Keys(k, v, page * size + positions % size, used)

    def with_descales_of_heads(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, with descales (Hk) as the (B, Hk) of attention."""
        heads, found = self.k_cache.shape[2], dict(options)
        for name in ("k_descale", "v_descale"):
            x = options.get(name)
            if isinstance(x, Tensor) and x.dim() == 1 and heads > 1 and x.shape[0] == heads:
                found[name] = x.expand(self.batch, heads)
        return found

    def append(
        self, lengths: Tensor | None, options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Write k and v into the cache. Returns q, rotated if they are, and the lengths then.

        Args:
            options: of fwd. With causal or a window each query has its own position;
                otherwise all have the first one's.
        """
        if self.k is None or lengths is None:
            return self.q, lengths
        window = max(options.get(f"window_{side}", -1) for side in ("left", "right"))
        descales = {name: options.get(name) for name in ("k_descale", "v_descale")}
        if self.k.dtype in QK_8_BITS:
            descales = {}  # as they are
        return self._written(lengths, bool(options.get("causal")) or window >= 0, descales)

    def _written(
        self, lengths: Tensor, moves: bool, descales: Mapping[str, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {
            "page_table": self.table(),
            "cu_seqlens_k": self.cu_seqlens_k_new,
            **descales,
        }
        if self.rotary_cos is not None and self.rotary_sin is not None:
            options |= {
                "q": self.q,
                "cu_seqlens_q": self.cu_seqlens_q,
                "rotary_cos": self.rotary_cos.contiguous(),
                "rotary_sin": self.rotary_sin.contiguous(),
                "rotary_seqlens": self.rotary_seqlens,
                "rotary_interleaved": self.rotary_interleaved,
                "q_at_one_position": not moves,
            }
        options = {name: x for name, x in options.items() if x is not None}
        found = ops.append_kv(self.k_cache, self.v_cache, self.k, self.v, lengths, **options)
        return found if "q" in options else (self.q, found[1])
