"""FlexAttention's interface, for masks.

The module's name differs from the function's, so that `flash_ext.flex_attention` is the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.compiler import is_compiling

from .functional import attention
from .mask import Mask
from .ops.checks import refuse, require_tensors

_masks: WeakKeyDictionary[Any, Mask] = WeakKeyDictionary()
"""Of each BlockMask, while it lives."""


def _mask_of(block_mask: Any) -> Mask:
    if is_compiling():
        return Mask.from_block_mask(block_mask)
    if block_mask not in _masks:
        _masks[block_mask] = Mask.from_block_mask(block_mask)
    return _masks[block_mask]


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: Literal[False] = False, kernel_options: Any = None, *, return_aux: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False, *,
    return_lse: Literal[True], kernel_options: Any = None, return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Any = None, *, return_aux: None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any,
) -> tuple[Tensor, Any]: ...  # fmt: skip
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Tensor | tuple[Tensor, Any]:
    """`torch.nn.attention.flex_attention.flex_attention` for masks, without a compiler.

    Args:
        query: (B, Hq, Sq, D).
        key, value: (B, Hk, Sk, D) and (B, Hk, Sk, Dv).
        score_mod: only None. `flash_ext.attention` has what most of them compute, as options.
        block_mask: a BlockMask. Its mask_mod is evaluated once, and the mask is kept while the
            BlockMask lives: make a new one where what mask_mod reads has changed. Or a `Mask`.
        scale: of the scores; None is 1 / sqrt(D).
        enable_gqa: whether Hq may be a multiple of Hk.
        return_lse: return lse too.
        kernel_options: of FlexAttention's kernels; without effect.
        return_aux: an AuxRequest, of lse alone.

    Returns:
        out (B, Hq, Sq, Dv), or with return_lse the pair (out, lse), with lse (B, Hq, Sq). With
        return_aux out and an AuxOutput.

    Raises:
        ValueError, RuntimeError: an argument is wrong.

    Examples:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
        >>> causal = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 8, 8, device="cpu")
        >>> flash_ext.flex_attention(q, k, v, block_mask=causal).shape
        torch.Size([1, 2, 8, 16])
    """
    require_tensors(query=query, key=key, value=value)
    if score_mod is not None:
        instead = "None: flash_ext.attention has softcap, alibi_slopes and bias instead"
        refuse("score_mod", instead, getattr(score_mod, "__name__", score_mod))
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

        if not isinstance(return_aux, AuxRequest) or return_aux.max_scores or return_lse:
            refuse("return_aux", "an AuxRequest of lse alone, without return_lse", return_aux)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            refuse(name, "of shape (batch, heads, seqlen, head_dim)", tuple(x.shape))
    if not enable_gqa and query.shape[1] != key.shape[1]:
        heads = f"{query.shape[1]} and {key.shape[1]}"
        refuse("enable_gqa", "True where query and key differ in heads", f"False with {heads}")
    mask = block_mask
    if mask is not None and not isinstance(mask, Mask):
        mask = _mask_of(mask)
        if mask.shape[1] not in (1, query.shape[1]):  # only a Mask may have key's heads
            refuse("block_mask", f"of 1 or {query.shape[1]} heads, as query", mask.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out
