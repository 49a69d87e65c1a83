"""The functions of flash-attn 2.8 below autograd, which other packages call, on flash_ext's ops.

Their names, arguments and results are as in `flash_attn_interface.py` of
github.com/Dao-AILab/flash-attention, and so are its names for the options; `flash_ext.flash_attn`
describes those and the values of softmax_lse. ring-flash-attn reads their defaults with
`inspect.getfullargspec`, so they are plain functions.

Nothing here records gradients or casts by autocast.

    out: (B, Sq, Hq, Dv), of packed sequences (total_q, Hq, Dv).
    softmax_lse: (B, Hq, Sq), of packed sequences (Hq, total_q); float32 (float64 for float64). A
        backward may be given the out and softmax_lse of a softmax over more keys than its k:
        the gradients are then this k's part.
    softmax_scale: None is 1 / sqrt(D), as it is in the functions above autograd.
    rng_state: int64 (2), of shape (0,) without dropout. A backward with dropout needs its
        forward's.
    return_softmax, zero_tensors, max_seqlen_q: have no effect. S_dmask has the shape (0,).
    softmax_d: flash-attn's intermediate result, which no caller needs; of shape (0,) here.

An unsupported argument raises NotImplementedError before anything runs; wrong arguments raise
ValueError or RuntimeError, and then no gradient was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..functional import attention_options
from ..ops.call import no_autocast
from ..ops.checks import check_rows, refuse, require_tensors, statistics_dtype
from .shared import (
    from_flash_attn_lse,
    options_of,
    refuse_given,
    rows_contiguous,
    to_flash_attn_lse,
)


def _offsets(cu_seqlens: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    if cu_seqlens is None:
        return {}
    cu_seqlens_q, cu_seqlens_k = cu_seqlens
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    seqused_k: Tensor | None,
    dropout_p: float,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require_tensors(q=q, k=k, v=v)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    with torch.no_grad(), no_autocast(q):
        given = attention_options(
            q, **options, **_offsets(cu_seqlens), seqused_k=seqused_k, dropout_p=dropout_p
        )
        out, lse = ops.forward(q, k, v, **given)
        seqlen_k = k.shape[1] if seqused_k is None else seqused_k
        lse = to_flash_attn_lse(lse, seqlen_k, cu_seqlens, options)
    rng_state = given.get("rng_state")
    if rng_state is None:
        rng_state = q.new_empty(0, dtype=torch.int64)
    return out, lse, q.new_empty(0), rng_state


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    gradients: Mapping[str, Tensor | None],
    cu_seqlens: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    rng_state: Tensor | None,
    deterministic: bool,
    options: Mapping[str, Any],
) -> Tensor:
    """gradients: dq, dk and dv, which are written in place; None is not wanted."""
    require_tensors(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    for (name, dx), x in zip(gradients.items(), (q, k, v), strict=True):
        if dx is not None:
            check_rows(name, dx, tuple(x.shape), x)
    if dropout_p == 0:
        rng_state = None
    elif rng_state is None or rng_state.numel() == 0:
        refuse("rng_state", "the forward's, with dropout_p > 0", None)
    dout, out = rows_contiguous(dout), rows_contiguous(out)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    with torch.no_grad():
        given = attention_options(
            q,
            **options,
            **_offsets(cu_seqlens),
            dropout_p=dropout_p,
            rng_state=rng_state,
            deterministic=deterministic or None,
        )
        lse = softmax_lse.to(statistics_dtype(q.dtype))
        lse = from_flash_attn_lse(lse, k.shape[1], cu_seqlens, options)
        found = ops.bwd(dout, None, q, k, v, out, lse, **given)
        for dx, x in zip(gradients.values(), found[:3], strict=True):
            if dx is not None:
                dx.copy_(x)
    return q.new_empty(0)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of q (B, Sq, Hq, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), see the module.

    Returns:
        out, softmax_lse, S_dmask, rng_state.

    Raises:
        ValueError, RuntimeError: an argument is wrong.
    """
    require_tensors(k=k)
    window = (window_size_left, window_size_right)
    options = options_of(softmax_scale, causal, window, softcap, alibi_slopes, k.shape[1])
    return _forward(q, k, v, None, None, dropout_p, options)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_flash_attn_forward` of packed sequences, q (total_q, Hq, D).

    Args:
        k, v: (total_k, Hk, D) and (total_k, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1), the bounds of the sequences.
        block_table, leftpad_k: not supported.
        seqused_k: int32 (B), how many of its keys a sequence uses; None is all.

    Returns:
        out, softmax_lse, S_dmask, rng_state.

    Raises:
        NotImplementedError: block_table or leftpad_k is given.
        ValueError, RuntimeError: an argument is wrong.
    """
    refuse_given(block_table=block_table, leftpad_k=leftpad_k)
    window = (window_size_left, window_size_right)
    options = options_of(softmax_scale, causal, window, softcap, alibi_slopes, max_seqlen_k)
    return _forward(q, k, v, (cu_seqlens_q, cu_seqlens_k), seqused_k, dropout_p, options)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients of `_flash_attn_forward` into dq, dk and dv.

    Args:
        dout: of out's shape.
        dq, dk, dv: of the shapes and dtypes of q, k and v, with any strides; None is not wanted.

    Returns:
        softmax_d.

    Raises:
        ValueError, RuntimeError: an argument is wrong, or rng_state is missing.
    """
    require_tensors(k=k)
    window = (window_size_left, window_size_right)
    options = options_of(softmax_scale, causal, window, softcap, alibi_slopes, k.shape[1])
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    return _backward(
        dout, q, k, v, out, softmax_lse, gradients, None, dropout_p, rng_state, deterministic,
        options,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` of packed sequences, see `_flash_attn_varlen_forward`.

    Like flash-attn's it has no seqused_k: the lengths are cu_seqlens_k's.
    """
    window = (window_size_left, window_size_right)
    options = options_of(softmax_scale, causal, window, softcap, alibi_slopes, max_seqlen_k)
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    return _backward(
        dout, q, k, v, out, softmax_lse, gradients, cu_seqlens, dropout_p, rng_state,
        deterministic, options,
    )  # fmt: skip
