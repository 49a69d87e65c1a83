"""Continuous batching of transformers: its wrappers of flash-attn, and what they call here.

transformers decodes from pages only with an implementation that it takes for flash-attn 2 or 3, and
imports the functions of one by `_lazy_imports`, whose name is private. `register` extends it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.masking_utils import flash_attention_mask

from ..cache import attention_with_cache
from ..flash_attn import pad_input, unpad_input
from ..flash_attn.shared import attend, options_of

_PAGED = "paged|"
"""Older releases put it before an implementation's name for continuous batching."""


def _options(
    seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    options = options_of(softmax_scale, causal, window_size, softcap or 0.0, None, seqlen_k)
    return options | {"sink": s_aux}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """`flash_ext.flash_attn.flash_attn_func` with transformers' name of a sink."""
    options = _options(k.shape[1], softmax_scale, causal, window_size, softcap, s_aux)
    options |= {"dropout_p": dropout_p, "deterministic": deterministic or None}
    return attend(q, k, v, None, False, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """`flash_ext.flash_attn.flash_attn_varlen_func` with transformers' name of a sink."""
    longest = max_seqlen_k if isinstance(max_seqlen_k, int) else None
    options = _options(longest, softmax_scale, causal, window_size, softcap, s_aux)
    options |= {"dropout_p": dropout_p, "deterministic": deterministic or None}
    return attend(q, k, v, (cu_seqlens_q.int(), cu_seqlens_k.int()), False, options)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Any:
    """`flash_ext.flash_attn.flash_attn_with_kvcache` with transformers' name of a sink.

    Sequences that pad a batch have cache_seqlens = -1: nothing is written, and they see no key.
    """
    options = _options(None, softmax_scale, causal, window_size, softcap, s_aux)
    return attention_with_cache(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        **options,
    )


_FUNCTIONS = (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    pad_input,
    unpad_input,
)


def _paged_forward(
    module: nn.Module,
    *tensors: Tensor | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> Any:
    """The wrapper of older releases, which ignores softcap, and a window that the layer has not."""
    if softcap is not None:
        raise NotImplementedError("flash_ext: softcap with pages needs a newer transformers")
    if sliding_window is not None:
        module.sliding_window = sliding_window  # type: ignore[assignment]
    from transformers.integrations.flash_paged import paged_attention_forward

    return paged_attention_forward(module, *tensors, **kwargs)


def register(name: str) -> None:
    """Make name an implementation of transformers' flash-attn, which continuous batching accepts.

    Nothing happens in a release that imports flash-attn otherwise.
    """
    names = (name, _PAGED + name)
    imports: Any = getattr(modeling_flash_attention_utils, "_lazy_imports", None)
    if imports is None:
        return
    if not hasattr(imports, "flash_ext_before"):

        def extended(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            if implementation in names:
                return _FUNCTIONS
            return imports(implementation, *args, **kwargs)

        extended.flash_ext_before = imports  # type: ignore[attr-defined]
        modeling_flash_attention_utils._lazy_imports = extended
    interface = transformers.AttentionInterface
    interface.register(name, flash_attention.flash_attention_forward)
    if hasattr(modeling_flash_attention_utils, "lazy_import_paged_flash_attention"):
        interface.register(_PAGED + name, _paged_forward)
    transformers.AttentionMaskInterface.register(name, flash_attention_mask)
