"""What people call: `flash_ext.attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    deterministic: bool | None = None,
    variant: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Exact attention, softmax(τ Q Kᵀ) V, in memory linear in the sequence length.

    Differentiable in q, k and v, through out and through lse. Sources: Dao et al.,
    "FlashAttention" (2022), Algorithms 2 and 4 (variant "fa1"); Dao, "FlashAttention-2" (2023),
    Algorithms 1 and 2 (variant "fa2").

    Args:
        q: queries (B, Sq, Hq, D), float16 or bfloat16; on CPU also float32 and float64. D is 1 to
            256. Any strides with a contiguous last dimension, as for k and v.
        k: keys (B, Sk, Hk, D), of q's dtype and device. Hq is a multiple of Hk: query head h reads
            key head h // (Hq / Hk) (grouped-query attention).
        v: values (B, Sk, Hk, D), of q's dtype and device.
        scale: τ, the factor of the scores; None is 1 / sqrt(D).
        causal: hide the keys after each query. Aligned bottom-right: the last query sees all keys.
        window: (left, right): query i sees keys i + Sk − Sq − left to i + Sk − Sq + right, both
            included; −1 is unlimited. causal is right = 0.
        softcap, alibi_slopes, bias, sink: not supported yet; leave the defaults.
        dropout_p: the probability of dropping an entry of P after the softmax, in [0, 1).
        rng_state: int64 of shape (2,) on q's device: seed and offset of the dropout mask
            (`flash_ext.dropout.keep_mask`). None draws them from torch's generator of that device.
        deterministic: gradients that repeat bit by bit. None follows
            `torch.are_deterministic_algorithms_enabled()`.
        variant: "fa1", "fa2", or "auto" for the fastest that runs. See `flash_ext.explain`.
        return_lse: return lse too.

    Returns:
        out (B, Sq, Hq, D) in q's dtype, contiguous; with return_lse the pair (out, lse), where lse
        (B, Hq, Sq) is the natural logarithm of the softmax's denominator, in float32 (float64 for
        float64). A query that sees no key gives out = 0, lse = −inf and zero gradients.

    Raises:
        ValueError, RuntimeError: an argument is wrong; the message names it, what was wanted and
            what came. NotImplementedError, a RuntimeError, where an option is not supported yet.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if dropout_p > 0 and rng_state is None:
        rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    out, lse = ops.fwd(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        dropout_p=dropout_p,
        rng_state=rng_state,
        deterministic=deterministic,
        variant=variant,
    )
    return (out, lse) if return_lse else out
