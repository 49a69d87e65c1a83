"""aten's `_flash_attention_forward` and `_flash_attention_backward`, computed by flash_ext.

These are what `torch.nn.attention.varlen.varlen_attn` runs on, and nested tensors in SDPA: layouts
as here, (total, H, D) with the offsets of the sequences, or (B, S, H, D). `sdpa.py` registers them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops

FORWARD = "_flash_attention_forward"
FORWARD_OUT = "_flash_attention_forward_no_dropout_inplace"  # of varlen_attn_out, since torch 2.13
BACKWARD = "_flash_attention_backward"

# What a caller may give besides, and what flash_ext makes of it. num_splits asks that a sequence's
# result does not depend on the others, which it never does here.
_MORE = {"scale", "window_size_left", "window_size_right", "seqused_k", "num_splits"}

_runs_on: dict[tuple[torch.device, torch.dtype, int], bool] = {}
"""Whether flash_ext has a kernel for this device, dtype and head dim."""


def has_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Of (B, S, H, D), whatever the sizes."""
    key = (q.device, q.dtype, q.shape[-1])
    if key not in _runs_on:
        try:
            ops.check(q, k, v)
        except (ValueError, RuntimeError):
            _runs_on[key] = False
        else:
            _runs_on[key] = True
    return _runs_on[key]


def strided_like(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides of empty_like(like), which is what torch.compile takes the ops to give."""
    if x.stride() == like.stride():  # then both are dense, and so would empty_like be
        return x
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like).copy_(x)


def random_state(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The generator's state, an unused tensor and the debug mask of a call without dropout."""
    empty = functools.partial(torch.empty, dtype=torch.uint64, device=like.device)
    return empty(2), empty(()), like.new_empty(0)


def _plain(x: Tensor | None, size: int | None = None) -> bool:
    """Whether this is an int32 vector as the ops take it, or none."""
    if x is None:
        return True
    fits = x.dim() == 1 and (size is None or x.shape[0] == size)
    return fits and x.dtype == torch.int32 and x.is_contiguous()


def supported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    debug: bool,
    more: dict[str, Any],
) -> bool:
    """Whether flash_ext runs this call; else torch does, and says what is wrong if anything is."""
    tensors = (query, key, value)
    packed = cum_seq_q is not None
    if dropout_p != 0.0 or debug or packed != (cum_seq_k is not None):
        return False
    if any(x is not None for name, x in more.items() if name not in _MORE):
        return False
    dims = 3 if packed else 4
    if any(x.dim() != dims or x.numel() == 0 or x.stride(-1) != 1 for x in tensors):
        return False
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return False
    if query.shape[-2] % key.shape[-2] != 0 or (not packed and len(query) != len(key)):
        return False
    batch = query.shape[0] if cum_seq_q is None else cum_seq_q.shape[0] - 1
    if not (_plain(cum_seq_q) and _plain(cum_seq_k, batch + 1)):
        return False
    if not _plain(more.get("seqused_k"), batch):
        return False
    return has_kernel(*(x[None] if packed else x for x in tensors))


def _options(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, is_causal: bool, more: dict[str, Any]
) -> dict[str, Any]:
    left, right = (more.get(f"window_size_{side}") for side in ("left", "right"))
    options = {
        "scale": more.get("scale"),
        "causal": is_causal,
        "window_left": -1 if left is None else max(left, -1),
        "window_right": -1 if right is None else max(right, -1),
        "cu_seqlens_q": cum_seq_q,
        "cu_seqlens_k": cum_seq_k,
        "seqused_k": more.get("seqused_k"),
    }
    return {name: x for name, x in options.items() if x is not None}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    is_causal: bool,
    more: dict[str, Any],
) -> tuple[Tensor, ...]:
    """What aten's forward op returns. Causal and windows are aligned bottom-right.

    Args:
        query, key, value: (total, H, D) with cum_seq_q and cum_seq_k, int32 (B + 1); else
            (B, S, H, D).
        more: the keyword options of the op, as given.

    Returns:
        out as query, lse (Hq, total) or (B, Hq, S) in float32, and the state of the random
        generator, an unused tensor and the debug mask, which have no content.
    """
    out, lse = ops.fwd(query, key, value, **_options(cum_seq_q, cum_seq_k, is_causal, more))
    return strided_like(out, query), lse, *random_state(query)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    is_causal: bool,
    more: dict[str, Any],
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, with their strides."""
    options = _options(cum_seq_q, cum_seq_k, is_causal, more)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    dq, dk, dv, _, _ = ops.bwd(
        grad_out, None, query, key, value, out, logsumexp.contiguous(), **options
    )
    pairs = zip((dq, dk, dv), (query, key, value), strict=True)
    return tuple(strided_like(x, like) for x, like in pairs)


def forward_kernel(original: Any) -> Callable[..., Any]:
    """The override of FORWARD. `original` is torch's kernel, for what flash_ext does not run."""

    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        **more: Any,
    ) -> Any:
        tensors, offsets = (query, key, value), (cum_seq_q, cum_seq_k)
        if supported(*tensors, *offsets, dropout_p, return_debug_mask, more):
            return forward(*tensors, *offsets, is_causal, more)
        rest = (max_q, max_k, dropout_p, is_causal, return_debug_mask)
        return original.call_boxed(keys, *tensors, *offsets, *rest, **more)

    return kernel


def forward_out_kernel(original: Any) -> Callable[..., Any]:
    """The override of FORWARD_OUT: writes out, returns lse."""

    def kernel(
        keys: Any,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        **more: Any,
    ) -> Any:
        tensors, offsets = (query, key, value), (cum_seq_q, cum_seq_k)
        if supported(*tensors, *offsets, dropout_p, return_debug_mask, more):
            found, lse, *_ = forward(*tensors, *offsets, is_causal, more)
            out.copy_(found)
            return lse
        rest = (max_q, max_k, dropout_p, is_causal, return_debug_mask)
        return original.call_boxed(keys, out, *tensors, *offsets, *rest, **more)

    return kernel


def backward_kernel(original: Any) -> Callable[..., Any]:
    """The override of BACKWARD."""

    # As in sdpa.py it does not matter whose forward kernel ran.
    def kernel(
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        **more: Any,
    ) -> Any:
        tensors = (grad_out, query, key, value, out, logsumexp)
        offsets = (cum_seq_q, cum_seq_k)
        if supported(query, key, value, *offsets, dropout_p, False, more):
            return backward(*tensors, *offsets, is_causal, more)
        rest = (max_q, max_k, dropout_p, is_causal, rng_state, unused)
        return original.call_boxed(keys, *tensors, *offsets, *rest, **more)

    return kernel
