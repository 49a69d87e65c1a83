"""Continuous batching of transformers (`generate_batch`) on flash_ext, and quantized caches.

Would catch pages read or written at other places, a window, softcap or sink that continuous
batching loses, a sequence that sees another's keys, a prefix that is shared wrongly, padded
sequences of CUDA graphs that write, and a transformers that imports flash-attn otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_transformers import build, registered, tokens, use
from torch import nn

from flash_ext.integrations import _transformers_paged
from flash_ext.integrations import transformers as fa_ext

transformers = pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("psutil", reason="continuous batching needs psutil")

NEW = 8

__all__ = ["registered"]  # a fixture that every test uses


def prompts(*lengths: int) -> list[list[int]]:
    """The last begins as the first does."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(2, 40, (n,), generator=generator).tolist() for n in lengths]
    return [*found, found[0] + [5, 6]]


def without_cache(model: nn.Module, prompt: list[int]) -> list[int]:
    """The greedy tokens, by eager attention to all tokens at each step."""
    use(model, "eager")
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        for _ in range(NEW):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids[0, len(prompt) :].tolist()


def batched(model: nn.Module, given: list[list[int]], **config: object) -> list[list[int]]:
    use(model, fa_ext.PAGED_NAME)
    greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    if "page_size" in config and "page_size" not in known:
        config["block_size"] = config.pop("page_size")
    config = transformers.ContinuousBatchingConfig(**config)
    done = model.generate_batch(
        inputs=given, generation_config=greedy, continuous_batching_config=config
    )
    outputs = [done[name] for name in sorted(done, key=lambda x: int(x.split("_")[-1]))]
    assert [x.error for x in outputs] == [None] * len(given)
    return [x.generated_tokens for x in outputs]


def wait_for_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers (5.17 and 5.23) makes and clears its inputs there, while other streams already
    copy and read the first batch: on a busy GPU it was cleared, or had tokens out of range."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs

    def waiting(call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def called(*args: Any, **options: Any) -> None:
            call(*args, **options)
            torch.cuda.synchronize()

        return called

    for name in ("__init__", "reset"):
        call = getattr(ContinuousBatchingAsyncIOs, name)
        monkeypatch.setattr(ContinuousBatchingAsyncIOs, name, waiting(call))


def skip_where_old(name: str) -> None:
    if name in ("gemma2", "gpt_oss") and is_old():
        pytest.skip("this transformers loses softcap, and lets no other name in for gpt_oss")


def is_old() -> bool:
    return hasattr(transformers.modeling_flash_attention_utils, "lazy_import_paged_flash_attention")


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_greedy_tokens(name):
    """In chunks of 16 tokens at most, with pages of 16 that sequences share."""
    skip_where_old(name)
    model, given = build(name), prompts(35, 4, 1, 12)
    expected = [without_cache(model, x) for x in given]
    found = batched(model, given, num_blocks=64, page_size=16, max_batch_tokens=16)
    assert found == expected


def test_softcap_that_is_lost_is_refused():
    if not is_old():
        pytest.skip("this transformers does not lose it")
    with pytest.raises(NotImplementedError, match="softcap"):
        _transformers_paged._paged_forward(nn.Module(), softcap=30.0)


def test_decoding_from_pages():
    """The call of transformers, of which a CPU makes none: a padded sequence has -1 keys on CUDA
    alone."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 6, 16, 2, 16)
    q, sink = torch.randn(2, 1, 4, 16), torch.randn(4)
    k, v = torch.randn(2, 2, 1, 2, 16)
    table = torch.tensor([[4, 1], [2, -1]], dtype=torch.int32)
    held = torch.tensor([18, 3], dtype=torch.int32)
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (9, 9), "softcap": 2.0}
    out = _transformers_paged.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=held, block_table=table, s_aux=sink, **options
    )
    for b, pages in enumerate(((4, 1), (2,))):
        keys, values = (x[list(pages)].flatten(0, 1)[: held[b] + 1] for x in (k_cache, v_cache))
        assert torch.equal(keys[-1], k[b, 0]) and torch.equal(values[-1], v[b, 0])
        expected = _transformers_paged.flash_attn_func(
            q[b : b + 1], keys[None], values[None], s_aux=sink, **options
        )
        torch.testing.assert_close(out[b : b + 1], expected)


def test_other_implementations_are_imported_as_before():
    imports = transformers.modeling_flash_attention_utils._lazy_imports
    fa_ext.register()
    assert transformers.modeling_flash_attention_utils._lazy_imports is imports
    with pytest.raises((ValueError, ImportError, AttributeError)):
        imports("no_flash_attention")
    assert imports(fa_ext.PAGED_NAME)[2] is _transformers_paged.flash_attn_with_kvcache


def test_quantized_cache():
    """It hands over keys in the model's type, fewer of them exact."""
    cache_utils = transformers.cache_utils

    class Rounded(cache_utils.QuantizedLayer):
        """Backends that round to bits are packages of their own."""

        def _quantize(self, tensor, axis):
            return tensor.bfloat16()

        def _dequantize(self, tensor):
            return tensor.float()

    model, found = build("llama"), []
    for implementation in (fa_ext.NAME, "eager"):
        use(model, implementation)
        layers = [Rounded(residual_length=4) for _ in range(model.config.num_hidden_layers)]
        options = {"past_key_values": cache_utils.Cache(layers=layers), "max_new_tokens": NEW}
        found.append(model.generate(tokens(), do_sample=False, **options))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_greedy_tokens_on_the_gpu(name, graphs, monkeypatch):
    """Each token has, in float32 without a cache, almost the largest logit. Layers with a window
    never decode from pages."""
    skip_where_old(name)
    wait_for_the_default_stream(monkeypatch)
    decoded = []
    call = _transformers_paged.attention_with_cache
    monkeypatch.setattr(
        _transformers_paged, "attention_with_cache",
        lambda *x, **options: decoded.append(1) or call(*x, **options),
    )  # fmt: skip
    model, given = build(name).to("cuda", torch.bfloat16), prompts(300, 35, 4, 1, 12)
    found = batched(model, given, num_blocks=64, max_batch_tokens=64, use_cuda_graph=graphs)
    if name == "llama":
        assert decoded
    model = model.float()
    use(model, "eager")
    for prompt, new in zip(given, found, strict=True):
        assert len(new) == NEW
        ids = torch.tensor([prompt + new], device="cuda")
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(new, device="cuda")[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() <= 0.05 * logits.abs().max()
