"""What a type checker makes of calls; `make lint` runs mypy on it, and nothing runs it."""

from torch import Tensor
from typing_extensions import assert_type

import flash_ext
from flash_ext import Mask, fp8
from flash_ext.flash_attn import flash_attn_func
from flash_ext.integrations import distributed as cp
from flash_ext.integrations import sdpa
from flash_ext.integrations import transformers as fa_ext


def calls(x: Tensor, cu_seqlens: Tensor, flag: bool) -> None:
    both = tuple[Tensor, Tensor]
    assert_type(flash_ext.attention(x, x, x), Tensor)
    assert_type(flash_ext.attention(x, x, x, causal=True, window=(3, 0), return_lse=False), Tensor)
    assert_type(flash_ext.attention(x, x, x, window=[3, 0]), Tensor)
    assert_type(flash_ext.attention(x, x, x, sink=x, return_lse=True), both)
    assert_type(flash_ext.attention(x, x, x, return_lse=flag), Tensor | both)
    packed = (x, x, x, cu_seqlens, cu_seqlens)
    assert_type(flash_ext.attention_varlen(*packed, dropout_p=0.1), Tensor)
    assert_type(flash_ext.attention_varlen(*packed, return_lse=True), both)
    assert_type(flash_ext.attention_varlen(*packed, return_lse=flag), Tensor | both)
    with_cache, with_prefix = flash_ext.attention_with_cache, flash_ext.attention_with_shared_prefix
    assert_type(with_cache(x, x, x, k=x, v=x, cache_seqlens=3, page_table=x), Tensor)
    assert_type(with_cache(x, x, x, window=(3, 0), return_lse=True), both)
    assert_type(with_cache(x, x, x, return_lse=flag), Tensor | both)
    assert_type(with_prefix(x, x, x, x, x, rotary_cos=x, prefix_seqlen=3), Tensor)
    assert_type(with_prefix(x, x, x, x, x, return_lse=flag), Tensor | both)
    with_cache(x, x, x, block_table=x)  # type: ignore[call-overload]
    flash_ext.attention(x, x, x, causl=True)  # type: ignore[call-overload]
    flash_ext.attention(x, x, x, softcap="5")  # type: ignore[call-overload]
    assert_type(fp8.attention(x, x, x, causal=True).sum(), Tensor)
    assert_type(fp8.attention(x, x, x, smooth_k=True, return_lse=False), Tensor)
    assert_type(fp8.attention(x, x, x, seed=3, return_lse=True), both)
    assert_type(fp8.attention(x, x, x, return_lse=flag), Tensor | both)
    assert_type(fp8.attention_varlen(*packed, max_seqlen_q=4), Tensor)
    assert_type(fp8.attention_varlen(*packed, return_lse=False), Tensor)
    assert_type(fp8.attention_varlen(*packed, return_lse=True), both)
    assert_type(fp8.attention_varlen(*packed, return_lse=flag), Tensor | both)
    fp8.attention(x, x, x, smoth_k=True)  # type: ignore[call-overload]
    assert_type(fp8.quantize(x, scales="channel"), both)
    assert_type(cp.attention(x, x, x, causal=True, group=None), Tensor)
    assert_type(cp.attention(x, x, x, return_lse=False), Tensor)
    assert_type(cp.attention(x, x, x, cu_seqlens=(0, 4), return_lse=True), both)
    assert_type(cp.attention(x, x, x, method="ring", return_lse=flag), Tensor | both)
    cp.attention(x, x, x, methd="ring")  # type: ignore[call-overload]
    assert_type(flash_ext.explain(x, x, x, causal=True), flash_ext.Explanation)


def masks(x: Tensor, cu_seqlens: Tensor, flag: bool) -> None:
    """Masks, triangle attention, and the drop-in names, as a model has them."""
    both = tuple[Tensor, Tensor]
    documents = Mask.documents(cu_seqlens=cu_seqlens, seqlen=8, causal=True)
    assert_type(documents & Mask.sinks(2, window=(4, 0), seqlen_q=8) | ~Mask.dense(x > 0), Mask)
    assert_type(Mask.prefix(2, seqlen_q=8, seqlen_k=8).to("cuda").density(), Tensor)
    assert_type(flash_ext.attention(x, x, x, mask=documents), Tensor)
    assert_type(flash_ext.attention_with_cache(x, x, x, return_lse=True), both)
    flex = flash_ext.flex_attention
    assert_type(flex(x, x, x, block_mask=documents, enable_gqa=True).sum(), Tensor)
    assert_type(flex(x, x, x, return_lse=True), both)
    assert_type(flex(x, x, x, return_lse=flag), Tensor | both)
    three = tuple[Tensor, Tensor, Tensor]
    triangle = flash_ext.triangle_attention
    assert_type(triangle(x, x, x, x, mask=x, scale=0.5).sum(), Tensor)
    assert_type(triangle(x, x, x, x, return_aux=True, kv_lengths=x), three)
    assert_type(triangle(x, x, x, x, return_aux=flag), Tensor | three)
    triangle(x, x, x)  # type: ignore[call-overload]
    Mask.dense([True])  # type: ignore[arg-type]
    flash_attn_func(x, x, x, causal=True)[0].sum()
    fa_ext.register()
    with sdpa.activated():
        assert_type(sdpa.activate(), None)
