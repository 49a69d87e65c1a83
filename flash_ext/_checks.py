"""The argument checks of the CPU kernels. The CUDA kernels have theirs in csrc/check.h, alike."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from ._options import VARIANTS, Options

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_HEAD_DIM = 256


def _refuse(argument: str, wanted: str, got: object) -> NoReturn:
    raise ValueError(f"flash_ext: {argument} must be {wanted}, got {got}")


def _require_shape(argument: str, tensor: Tensor, shape: tuple[int, ...], layout: str) -> None:
    if tuple(tensor.shape) != shape:
        _refuse(argument, f"of shape {layout} = {shape}", tuple(tensor.shape))


def _require_like(argument: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype != q.dtype:
        _refuse(argument, f"of q's dtype {q.dtype}", tensor.dtype)
    if tensor.device != q.device:
        _refuse(argument, f"on q's device {q.device}", tensor.device)
    if tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        _refuse(argument, "contiguous in its last dimension", f"strides {tensor.stride()}")


def _require_statistics(argument: str, tensor: Tensor, q: Tensor) -> None:
    batch, seqlen_q, heads, _ = q.shape
    _require_shape(argument, tensor, (batch, heads, seqlen_q), "(batch, heads_q, seqlen_q)")
    if tensor.dtype != statistics_dtype(q.dtype):
        _refuse(argument, f"{statistics_dtype(q.dtype)}", tensor.dtype)
    if tensor.device != q.device:
        _refuse(argument, f"on q's device {q.device}", tensor.device)
    if not tensor.is_contiguous():
        _refuse(argument, "contiguous", f"strides {tensor.stride()}")


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulators, softmax and lse: float32, or float64 for float64 inputs (CPU only)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_options(q: Tensor, options: Options) -> None:
    if options.scale is not None and not math.isfinite(options.scale):
        _refuse("scale", "finite", options.scale)
    for name in ("window_left", "window_right"):
        if getattr(options, name) < -1:
            _refuse(name, "at least -1 (unlimited)", getattr(options, name))
    if not 0 <= options.dropout_p < 1:
        _refuse("dropout_p", "in [0, 1)", options.dropout_p)
    if options.dropout_p == 0:
        return
    state = options.rng_state
    if state is None:
        _refuse("rng_state", "given when dropout_p > 0", None)
    if state.dtype != torch.int64 or tuple(state.shape) != (2,):
        _refuse("rng_state", "int64 of shape (2,)", f"{state.dtype} of {tuple(state.shape)}")
    if state.device != q.device:
        _refuse("rng_state", f"on q's device {q.device}", state.device)


def _check_variant(options: Options) -> str:
    if options.variant not in ("auto", *VARIANTS):
        _refuse("variant", f"'auto' or one of {VARIANTS}", repr(options.variant))
    variant = "fa2" if options.variant == "auto" else options.variant
    tensors = ("alibi_slopes", "bias", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    unsupported = [name for name in tensors if getattr(options, name) is not None]
    if options.softcap != 0:
        unsupported.insert(0, "softcap")
    if unsupported:
        raise NotImplementedError(
            f"flash_ext: {unsupported[0]} is not supported yet by variant '{variant}'"
        )
    return variant


def check_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str:
    """Check the arguments of the forward pass and choose the variant.

    Returns:
        The variant that runs.

    Raises:
        ValueError: an argument is wrong; the message names it, what was wanted and what came.
        NotImplementedError: an option that the chosen variant lacks.
    """
    variant = _check_variant(options)
    layouts = (
        ("q", q, "(batch, seqlen_q, heads_q, head_dim)"),
        ("k", k, "(batch, seqlen_k, heads_k, head_dim)"),
        ("v", v, "(batch, seqlen_k, heads_k, head_dim)"),
    )
    for name, tensor, layout in layouts:
        if tensor.dim() != 4:
            _refuse(name, f"of shape {layout}", tuple(tensor.shape))
    if q.dtype not in _DTYPES:
        _refuse("q", "float16, bfloat16, float32 or float64", q.dtype)
    for name, tensor, _ in layouts:
        _require_like(name, tensor, q)
    batch, _, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, _ = k.shape
    if not 1 <= head_dim <= _MAX_HEAD_DIM:
        _refuse("q's head dimension", f"1 to {_MAX_HEAD_DIM}", head_dim)
    _require_shape("k", k, (batch, seqlen_k, heads_k, head_dim), layouts[1][2])
    if heads_k == 0 or heads_q % heads_k != 0:
        _refuse("q's number of heads", f"a multiple of k's, {heads_k}", heads_q)
    _require_shape("v", v, (batch, seqlen_k, heads_k, v.shape[3]), layouts[2][2])
    if v.shape[3] != head_dim:
        raise NotImplementedError(
            f"flash_ext: v with a head dimension ({v.shape[3]}) other than q's ({head_dim}) is not "
            f"supported yet by variant '{variant}'"
        )
    _check_options(q, options)
    return variant


def check_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
) -> str:
    """Check the arguments of the backward pass and choose the variant, as `check_forward` does."""
    variant = check_forward(q, k, v, options)
    batch, seqlen_q, heads, _ = q.shape
    for name, tensor in (("dout", dout), ("out", out)):
        shape = (batch, seqlen_q, heads, v.shape[3])
        _require_shape(name, tensor, shape, "(batch, seqlen_q, heads_q, head_dim)")
        _require_like(name, tensor, q)
    _require_statistics("lse", lse, q)
    if dlse is not None:
        _require_statistics("dlse", dlse, q)
    return variant
