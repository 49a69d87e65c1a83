"""Calls with a `Mask`: as lists of blocks where the kernels have them, otherwise as a bool bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import ops
from .cpu.checks import check_offsets
from .cpu.tile_mask import by_query_heads
from .mask import Mask
from .ops.checks import refuse, require_ints
from .ops.options import MASK_BLOCK, MASK_OPTIONS
from .ops.torch_private import (
    constant_when_compiled,
    in_dispatch_mode,
    in_trace,
    in_transforms,
    ordinary_tensors,
)

BAND = ("causal", "window_left", "window_right")
"""The options that a mask has within it."""

_OF_EACH_SEQUENCE = (
    *("alibi_slopes", "bias", "dropout_p", "seqused_k"),
    *("q_descale", "k_descale", "v_descale"),
)
"""Options whose batch or positions are of sequences: packed ones are one batch beside a mask."""

WORTH_A_MASK = 1 << 18
"""Pairs of a query and a key, above which a bool bias becomes a mask."""

_answers: dict[Any, bool] = {}


def _require_fit(mask: Mask, q: Tensor, k: Tensor) -> None:
    """The mask is one for these queries and keys. Of wrong dimensions the ops complain."""
    if not isinstance(mask, Mask):
        hint = "a flash_ext.Mask (Mask.dense makes one of a bool tensor)"
        refuse("mask", hint, f"a value of type {type(mask).__name__}")
    if q.dim() == k.dim() == 4:
        (batch, rows, heads, _), (_, keys, heads_k, _) = q.shape, k.shape
        shape = mask.shape
        fits = shape[0] in (1, batch) and shape[1] in (1, heads, heads_k)
        if not fits or shape[2] != rows or shape[3] != keys:
            wanted = f"(batch or 1, heads_q, heads_k = {heads_k} or 1, seqlen_q, seqlen_k)"
            refuse("mask", f"of shape {wanted} with sizes {(batch, heads, rows, keys)}", shape)
    if mask.device != q.device:
        refuse("mask", f"on q's device {q.device}", mask.device)


def _fits(bias: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether the ops accept this bias, of q (B, Sq, Hq, D) and k (B, Sk, Hk, D)."""
    if not bias.dim() == q.dim() == k.dim() == 4 or bias.device != q.device:
        return False
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    return all(a in (1, b) for a, b in zip(bias.shape, sizes, strict=True))


def window_of(given: dict[str, Any]) -> tuple[bool, tuple[int, int]]:
    """causal and window among the options of the ops."""
    return given.get("causal", False), (given.get("window_left", -1), given.get("window_right", -1))


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Mask, given: dict[str, Any]) -> dict[str, Any]:
    """The options of the ops with a mask."""
    _require_fit(mask, q, k)
    bias = given.get("bias")
    if bias is not None and bias.dtype == torch.bool:
        if not _fits(bias, q, k):
            return given  # the ops refuse it
        mask = mask.with_bias(bias)
        given = {name: x for name, x in given.items() if name != "bias"}
    rest = {name: x for name, x in given.items() if name not in BAND}
    if runs(q, k, v, rest, mask=mask):
        return rest | mask.folded(*window_of(given)).options()
    visible = by_query_heads(mask.to_dense(), q.shape[2])
    if "bias" in given:
        visible = given["bias"].masked_fill(~visible, -torch.inf)
    return given | {"bias": visible}


def with_bool_bias(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, given: dict[str, Any]
) -> dict[str, Any]:
    """The options of the ops, where a large bool bias on a GPU is a mask if kernels have it.

    bias is the caller's tensor, by which its mask is kept. A traced graph would have that mask as a
    constant.
    """
    traced = is_compiling() or in_trace() or in_dispatch_mode() > 0
    if traced or in_transforms() or not (q.is_cuda and q.dim() == k.dim() == 4):
        return given
    sizes = q.shape[1], k.shape[1]
    if sizes[0] * sizes[1] < WORTH_A_MASK or not all(map(ops.is_real, (q, bias))):
        return given
    if not _fits(given["bias"], q, k):
        return given  # the ops refuse it
    rest = {name: x for name, x in given.items() if name not in (*BAND, "bias")}
    if not runs(q, k, v, rest):
        return given
    causal, (left, right) = window_of(given)
    return rest | Mask.of_bias(bias, *sizes, (left, 0 if causal else right)).options()


def with_packed_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, given: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Packed sequences with a mask over all their rows: as one dense call, and its options."""
    offsets = tuple((x, given[x]) for x in ("cu_seqlens_q", "cu_seqlens_k"))
    for name in _OF_EACH_SEQUENCE:
        if name in given:
            got = "a tensor" if isinstance(given[name], Tensor) else given[name]
            refuse(name, "left out with a mask in attention_varlen", got)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            refuse(name, "of shape (total, heads, head_dim)", tuple(x.shape))
    for (name, x), rows in zip(offsets, (q, k), strict=True):
        require_ints(name, x, (offsets[0][1].numel(),), q)
        if x.numel() == 0:
            refuse(name, "of shape (batch + 1)", tuple(x.shape))
        if q.device.type == "cpu" and not is_compiling():
            check_offsets(name, x, rows.shape[0])
    q, k, v = q[None], k[None], v[None]
    _require_fit(mask, q, k)
    mask = mask.within((offsets[0][1], offsets[1][1]), *window_of(given))
    names = (*BAND, *(name for name, _ in offsets))
    rest = {name: x for name, x in given.items() if name not in names}
    return q, k, v, with_mask(q, k, v, mask, rest)


# --- Whether kernels have masks ---


def runs(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], mask: Mask | None = None) -> bool:
    """Whether the variant has a mask beside these options (None: one of bits), forward and, if
    gradients are wanted, backward: asked by the op that `flash_ext.explain` asks, once for calls
    that look the same."""
    trains = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or any(isinstance(x, Tensor) and x.requires_grad for x in given.values())
    )
    bits = mask is None or mask.per_query == 0
    if is_compiling() or in_transforms() or not ops.is_real(q):
        plain = {n: x for n, x in given.items() if not isinstance(x, Tensor | torch.SymFloat)}
        tensors = {n: x.dtype for n, x in given.items() if isinstance(x, Tensor)}
        heads = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        dtypes = q.dtype, k.dtype, v.dtype
        about = tuple(plain.items()), tuple(tensors.items())
        found: bool = _sample_runs(str(q.device), dtypes, heads, trains, bits, *about)
        return found
    key: Any = (
        *(trains, bits, None if mask is None else mask.shape[:2], q.device),
        *(q.dtype, q.shape, q.stride(), k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride()),
    )
    if given:
        items = given.items()
        key += tuple((n, x.dtype, x.shape) if isinstance(x, Tensor) else (n, x) for n, x in items)
    if key not in _answers:
        if len(_answers) >= 4096:
            _answers.clear()
        options = _sample_mask(q, k, bits) if mask is None else mask.options()
        _answers[key] = _ask(q, k, v, given | options, trains)
    return _answers[key]


def _ask(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], trains: bool) -> bool:
    """What `ops.check` says of a call with a mask."""
    try:
        _, backward, *_ = ops.check(q, k, v, **given)
    except (ValueError, RuntimeError):
        return False
    return backward >= 0 or not trains


def _sample_mask(q: Tensor, k: Tensor, bits: bool) -> dict[str, Tensor]:
    """The options of a mask, of which only the shapes are meant."""
    blocks_q, blocks_k = (-(-x.shape[1] // MASK_BLOCK) for x in (q, k))
    words = (blocks_q, blocks_k, MASK_BLOCK, 4) if bits else (blocks_q * MASK_BLOCK, 4)
    shapes = (blocks_q, 8), (blocks_k, 8), words
    tensors = (torch.empty((1, 1, *x), dtype=torch.int32, device=q.device) for x in shapes)
    return dict(zip(MASK_OPTIONS, tensors, strict=True))


@constant_when_compiled
def _sample_runs(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    heads: tuple[int, int, int, int],
    trains: bool,
    bits: bool,
    plain: tuple[tuple[str, Any], ...],
    tensors: tuple[tuple[str, torch.dtype], ...],
) -> bool:
    """`runs` of a call of these head dims and options with 128 queries and keys: a compiler's
    tensors have no elements, and any sizes."""
    heads_q, heads_k, dim, dim_v = heads
    shapes = {
        "alibi_slopes": (heads_q,),
        "bias": (1, heads_q, 128, 128),
        "sink": (heads_q,),
        "rng_state": (2,),
    }
    if device == "meta" or any(name not in shapes for name, _ in tensors):
        return False
    with ordinary_tensors(), torch.no_grad():
        rows = (heads_q, dim), (heads_k, dim), (heads_k, dim_v)
        q, k, v = (
            torch.empty((1, 128, *x), dtype=dtype, device=device)
            for x, dtype in zip(rows, dtypes, strict=True)
        )
        given = {n: torch.empty(shapes[n], dtype=x, device=device) for n, x in tensors}
        return _ask(q, k, v, dict(plain) | given | _sample_mask(q, k, bits), trains)
