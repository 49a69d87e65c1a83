"""The CPU kernel of `torch.ops.flash_ext.append_kv`.

Its checks are also the words with which the CUDA kernel refuses (csrc/api/append_kv.cpp has the
same conditions).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.checks import dtype_name, refuse, require_device, statistics_dtype
from ..ops.options import DESCALE_ROWS, FP8, QK_8_BITS
from ..ops.schemas import library
from .checks import check_descale, check_offsets, require_plain

_CUDA_DTYPES = (torch.float16, torch.bfloat16, *QK_8_BITS)
_DTYPES = (*_CUDA_DTYPES, torch.float32, torch.float64)
_MAX_ROWS = 2**31


def _require(
    name: str, x: Tensor, like: Tensor, shape: tuple[int | str, ...], dtype: torch.dtype
) -> None:
    """Of this shape, in which words stand for any size, and contiguous in its last dimension."""
    fits = x.dim() == len(shape) and all(
        isinstance(size, str) or size == found for size, found in zip(shape, x.shape, strict=True)
    )
    if not fits:
        refuse(name, f"of shape ({', '.join(map(str, shape))})", tuple(x.shape))
    if x.dtype != dtype:
        refuse(name, dtype_name(dtype), x.dtype)
    require_device(name, x, like)
    if x.numel() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1:
        refuse(name, "contiguous in its last dimension", f"strides {x.stride()}")


def _require_cache(name: str, cache: Tensor, k_cache: Tensor) -> None:
    dtypes: tuple[torch.dtype, ...] = _CUDA_DTYPES if cache.device.type == "cuda" else _DTYPES
    of_8_bits = k_cache.dtype in QK_8_BITS
    if name == "v_cache":
        dtypes = QK_8_BITS if of_8_bits else (k_cache.dtype,)
    if cache.dtype not in dtypes:
        refuse(name, " or ".join(map(dtype_name, dtypes)), cache.dtype)
    rows: tuple[int | str, ...] = ("pages", "page_size", "heads_k", "head_dim")
    if name == "v_cache":
        rows = (*k_cache.shape[:3], "head_dim_v")
    _require(name, cache, k_cache, rows, cache.dtype)
    if any(size > 1 and step == 0 for size, step in zip(cache.shape, cache.stride(), strict=True)):
        refuse(name, "of separate memory for each element", f"strides {cache.stride()}")
    if max(cache.shape[:2]) >= _MAX_ROWS:
        refuse(name, "below 2^31 pages and rows of a page", tuple(cache.shape))


def _require_rows(
    name: str,
    x: Tensor,
    cache: Tensor,
    rows: tuple[int | str, int | str, int],
    batch: int,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """x has rows of this number, heads and columns, of a batch or packed."""
    packed = cu_seqlens is not None
    shape = rows if packed else (batch, *rows)
    _require(name, x, cache, shape, dtype)
    if x.shape[-3] >= _MAX_ROWS:
        refuse(name, "below 2^31 rows", tuple(x.shape))


def _require_offsets(name: str, cu_seqlens: Tensor | None, x: Tensor, batch: int) -> None:
    require_plain(name, cu_seqlens, x, torch.int32, (batch + 1,), "(batch + 1)")
    if cu_seqlens is not None and x.device.type != "cuda":
        check_offsets(name, cu_seqlens, x.shape[0])


def _dtypes_of_rows(k_cache: Tensor, v_cache: Tensor, k: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Of k and v. In a cache of 8 bits both may have k's, of more bits."""
    dtypes = _CUDA_DTYPES if k.device.type == "cuda" else _DTYPES
    if is_quantized(k_cache, k) and k.dtype in dtypes:
        return k.dtype, k.dtype
    return k_cache.dtype, v_cache.dtype


def is_quantized(k_cache: Tensor, k: Tensor) -> bool:
    """Are rows quantized on their way into the cache?"""
    return k_cache.dtype in QK_8_BITS and k.is_floating_point() and k.dtype not in QK_8_BITS


def _check_descales(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    capacity: int,
    batch: int,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    shape, blocks = (batch, k_cache.shape[2]), -(-capacity // DESCALE_ROWS)
    for name, descale, large, last in (
        ("k_descale", k_descale, "(batch, heads_k, blocks of 128 keys)", blocks),
        ("v_descale", v_descale, "(batch, heads_k, head_dim_v)", v_cache.shape[3]),
    ):
        if descale is None:
            continue
        if not is_quantized(k_cache, k):
            refuse(name, "None unless k and v are quantized for a cache of 8 bits", "a tensor")
        check_descale(name, descale, k_cache, shape, large, last)


def _check_rotary(
    k_cache: Tensor,
    dtype: torch.dtype,
    batch: int,
    q: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_seqlens: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None:
    given = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    if q is None:
        for name, x in (given | {"rotary_seqlens": rotary_seqlens}).items():
            if x is not None:
                refuse(name, "None without q, which is rotated too", "a tensor")
        if cu_seqlens_q is not None:
            refuse("cu_seqlens_q", "None without q", "a tensor")
        return
    for name, x in given.items():
        if x is None:
            refuse(name, "given with q, and with the other one", None)
    assert rotary_cos is not None and rotary_sin is not None
    dim = k_cache.shape[3]
    if dtype in QK_8_BITS:
        refuse("k", "of 16 bits or more if it is rotated", dtype)
    _require_rows("q", q, k_cache, ("seqlen_q", "heads_q", dim), batch, cu_seqlens_q, dtype)
    _require_offsets("cu_seqlens_q", cu_seqlens_q, q, batch)
    if rotary_cos.dtype not in (q.dtype, torch.float32):
        refuse("rotary_cos", f"{dtype_name(q.dtype)} or float32", rotary_cos.dtype)
    if rotary_cos.dim() != 2 or not 0 < rotary_cos.shape[1] <= dim // 2:
        refuse("rotary_cos", f"of shape (positions, 1 to {dim // 2})", tuple(rotary_cos.shape))
    if not 0 < rotary_cos.shape[0] < _MAX_ROWS:
        refuse("rotary_cos", "of 1 position to 2^31 - 1", tuple(rotary_cos.shape))
    for name, x in given.items():
        shape = tuple(rotary_cos.shape)
        require_plain(name, x, k_cache, rotary_cos.dtype, shape, "(positions, rotary_dim / 2)")
    require_plain("rotary_seqlens", rotary_seqlens, k_cache, torch.int32, (batch,), "(batch)")


def check_append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    q: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = False,
    q_at_one_position: bool = False,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Check the arguments of `append_kv`."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _require_cache(name, cache, k_cache)
    batch = cache_seqlens.numel()
    require_plain("cache_seqlens", cache_seqlens, k_cache, torch.int32, (batch,), "(batch)")
    if page_table is not None:
        shape = (batch, "pages of a sequence")
        _require("page_table", page_table, k_cache, shape, torch.int32)
        if k_cache.shape[1] == 0:
            refuse("k_cache", "of pages with at least one row", tuple(k_cache.shape))
    elif k_cache.shape[0] < batch:
        refuse("k_cache", f"of a batch of at least {batch}", tuple(k_cache.shape))
    heads, dims = k_cache.shape[2], (k_cache.shape[3], v_cache.shape[3])
    dtype, dtype_v = _dtypes_of_rows(k_cache, v_cache, k)
    _require_rows("k", k, k_cache, ("seqlen_new", heads, dims[0]), batch, cu_seqlens_k, dtype)
    _require_rows("v", v, v_cache, (k.shape[-3], heads, dims[1]), batch, cu_seqlens_k, dtype_v)
    _require_offsets("cu_seqlens_k", cu_seqlens_k, k, batch)
    _check_rotary(k_cache, dtype, batch, q, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_q)
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    _check_descales(k_cache, v_cache, k, capacity, batch, k_descale, v_descale)


def _places(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each row of (B, S, …), or packed (total, …): its sequence, and its index there. A row of
    no sequence has the number of sequences."""
    rows = torch.arange(math.prod(x.shape[: 2 if cu_seqlens is None else 1]), device=x.device)
    if cu_seqlens is None:
        length = max(x.shape[1], 1)
        return rows // length, rows % length
    cu_seqlens = cu_seqlens.long()
    sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    return sequence, rows - cu_seqlens[sequence]


def _flat(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.flatten(0, 1) if cu_seqlens is None else x


def rotate(
    rows: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Rows (n, H, D), rotated by their positions (n) in cos and sin (positions, R / 2)."""
    known = ((positions >= 0) & (positions < cos.shape[0]))[:, None, None]
    dtype, half = statistics_dtype(rows.dtype), cos.shape[1]
    at = positions.clamp(0, cos.shape[0] - 1)
    c, s = (torch.where(known, x[at].to(dtype)[:, None], math.nan) for x in (cos, sin))
    result = rows.clone()
    if interleaved:
        x, y = (rows[..., i : 2 * half : 2].to(dtype) for i in range(2))
        into = [result[..., i : 2 * half : 2] for i in range(2)]
    else:
        x, y = (rows[..., i : i + half].to(dtype) for i in (0, half))
        into = [result[..., i : i + half] for i in (0, half)]
    into[0].copy_(x * c - y * s)
    into[1].copy_(x * s + y * c)
    return result


def _factors(descale: Tensor | None, sequence: Tensor, last: Tensor | None) -> Tensor:
    """A descale for each row (n), which broadcasts to (n, H, D).

    Args:
        last: of k the block of each row; None for v, whose last dimension are columns.
    """
    if descale is None:
        return torch.ones((), device=sequence.device)
    if descale.dim() < 2:
        return descale.reshape(())
    if descale.dim() == 2:
        return descale[sequence][..., None]
    if last is None:
        return descale[sequence]
    return descale[sequence, :, last.clamp(0, descale.shape[2] - 1)][..., None]


def _to_8_bits(rows: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.where(factors == 0, 0.0, rows.float() / factors)
    if dtype == FP8:
        largest = torch.finfo(FP8).max
        return torch.where(x.isnan(), math.nan, x.clamp(-largest, largest)).to(FP8)
    return x.nan_to_num(0.0, math.inf, -math.inf).round().clamp(-127, 127).to(torch.int8)


def _write(cache: Tensor, rows: Tensor, pages: Tensor, page_rows: Tensor) -> None:
    if cache.element_size() == 1:  # of which index_put_ knows only uint8
        cache, rows = cache.view(torch.uint8), rows.contiguous().view(torch.uint8)
    cache.index_put_((pages, page_rows), rows)


def _append_kv_cpu(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    q: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = False,
    q_at_one_position: bool = False,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_append_kv(
        k_cache, v_cache, k, v, cache_seqlens, q=q, page_table=page_table,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    batch, (pages, size) = cache_seqlens.numel(), k_cache.shape[:2]
    begins = cache_seqlens.long()
    first = begins if rotary_seqlens is None else rotary_seqlens.long()
    sequence, index = _places(k, cu_seqlens_k)
    rows_k, rows_v = _flat(k, cu_seqlens_k), _flat(v, cu_seqlens_k)
    mine = sequence < batch
    sequence, index, rows_k, rows_v = (x[mine] for x in (sequence, index, rows_k, rows_v))
    if quantized := is_quantized(k_cache, k):
        rows_k, rows_v = rows_k.to(statistics_dtype(k.dtype)), rows_v.to(statistics_dtype(k.dtype))

    result = k.new_empty(0)
    if q is not None and rotary_cos is not None and rotary_sin is not None:
        rotary = rotary_cos, rotary_sin, rotary_interleaved
        rows_k = rotate(rows_k, first[sequence] + index, *rotary)
        of_q, at = _places(q, cu_seqlens_q)
        owned = of_q < batch
        positions = first[of_q[owned]] + (0 if q_at_one_position else at[owned])
        flat = _flat(q, cu_seqlens_q).clone(memory_format=torch.contiguous_format)
        flat[owned] = rotate(flat[owned], positions, *rotary)
        result = flat.view(q.shape)

    position = begins[sequence] + index
    blocks = 1 if page_table is None else page_table.shape[1]
    kept = (position >= 0) & (position < blocks * size)
    if page_table is None:
        page = sequence
    elif page_table.numel() > 0:
        page = page_table[sequence, (position // max(size, 1)).clamp(0, blocks - 1)].long()
        kept &= (page >= 0) & (page < pages)
    else:
        page = sequence
    sequence, page, position, rows_k, rows_v = (
        x[kept] for x in (sequence, page, position, rows_k, rows_v)
    )
    if quantized:
        of_k = _factors(k_descale, sequence, position // DESCALE_ROWS)
        rows_k = _to_8_bits(rows_k, of_k, k_cache.dtype)
        rows_v = _to_8_bits(rows_v, _factors(v_descale, sequence, None), v_cache.dtype)
    for cache, rows in ((k_cache, rows_k), (v_cache, rows_v)):
        _write(cache, rows, page, position % max(size, 1))
    return result, cache_seqlens + (k.shape[1] if cu_seqlens_k is None else cu_seqlens_k.diff())


library.impl("append_kv", _append_kv_cpu, "CPU")
