"""flash_ext in transformers: whole small models against eager and SDPA, and each mask by itself.

Would catch a mask that is left out or aligned otherwise, a window or a chunk off by one, softcap,
sinks or a position bias that do not arrive, padding or packed sequences that see each other, a
cache's empty places that are seen, padded queries of cross attention taken for padding, what is not
supported and yet taken, and a transformers that tells of masks otherwise than it did.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from attention_testing import Expected, assert_accurate
from forked import run_python
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.5", reason="needs transformers 5")

from transformers import masking_utils  # noqa: E402

from flash_ext import functional  # noqa: E402
from flash_ext.integrations import sdpa  # noqa: E402
from flash_ext.integrations import transformers as fa_ext  # noqa: E402

S, WINDOW = 12, 5
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
# All experts for every token: a choice between them would turn on the last digit.
MOE = {"num_local_experts": 2, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("Llama", "ForCausalLM", DECODER),
    "mistral": ("Mistral", "ForCausalLM", DECODER | {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        "ForCausalLM",
        DECODER | {"sliding_window": WINDOW, "attn_logit_softcapping": 1.5},
    ),
    "gpt_oss": ("GptOss", "ForCausalLM", DECODER | MOE | {"sliding_window": WINDOW}),
    "llama4": (
        "Llama4Text",
        "Llama4ForCausalLM",
        DECODER | MOE | {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 48},
    ),
    "bert": ("Bert", "ForMaskedLM", SIZES | {"initializer_range": 0.3}),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0, "dropout_rate": 0.0},
    ),
}
CAUSAL = [name for name in MODELS if name not in ("bert", "t5")]
# SDPA has neither softcap nor sinks; transformers runs models with sinks only on eager.
NOT_ON_SDPA = ("gemma2", "gpt_oss")
MASKS = {
    "whole": torch.ones(2, S, dtype=torch.long),
    "left": torch.tensor([[0] * 4 + [1] * 8, [1] * 12]),
    "right": torch.tensor([[1] * 12, [1] * 7 + [0] * 5]),
    "both ends": torch.tensor([[0] * 2 + [1] * 7 + [0] * 3, [1] * 12]),
    "holes": torch.tensor([[1] * 3 + [0] * 2 + [1] * 7, [0] * 1 + [1] * 4 + [0] * 4 + [1] * 3]),
}
PACKED = torch.cat([torch.arange(n) for n in (3, 7, 2)])[None]
CU_SEQLENS = torch.tensor([0, 3, 10, 12], dtype=torch.int32)


@pytest.fixture(autouse=True)
def registered():
    fa_ext.register()


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, dict]]:
    """The calls that the attention function makes: which, and with what options."""
    made: list[tuple[str, dict]] = []
    for name in ("attention", "attention_varlen"):
        call = getattr(functional, name)

        def record(*tensors, call=call, name=name, **options):
            given = {k: x for k, x in options.items() if x is not None}
            made.append((name, given))
            return call(*tensors, **options)

        monkeypatch.setattr(fa_ext, name, record)
    return made


def build(name: str, **changes) -> nn.Module:
    config, model, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config + "Config")(**(sizes | changes))
    model = getattr(transformers, model if model.startswith("Llama4") else MODELS[name][0] + model)
    if not hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("its attention is its own in this transformers")
    return model(config).eval()


def tokens(batch: int = 2, length: int = S) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, 40, (batch, length), generator=generator)


def batch_of(name: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs of a model, padded as mask says; T5's decoder gets them the other way round."""
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    if name == "t5":
        inputs |= {"decoder_input_ids": tokens().flip(0, 1), "decoder_attention_mask": mask.flip(1)}
    elif name != "bert":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


def use(model: nn.Module, implementation: str) -> None:
    """As attn_implementation of from_pretrained; set_attn_implementation leaves out some models."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation


def run(model: nn.Module, implementation: str, inputs: dict, counted=None) -> dict:
    """Logits, and the gradients of all parameters; of the tokens that counted, (B, S), names."""
    use(model, implementation)
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    if counted is None:
        counted = torch.ones_like(logits[..., 0])
    logits = logits * counted[..., None].to(logits)
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(logits.shape, generator=generator).to(logits)
    (logits * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | gradients


def assert_same(actual: dict, expected: dict, tolerance: float = 2e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        scale = max(1.0, float(expected[name].abs().max()))
        error = float((x - expected[name]).abs().max())
        assert error <= tolerance * scale, f"{name}: {error:.2e}, largest {scale:.2e}"


def skip_static_chunks(name: str, cache: str | None) -> None:
    chunked = inspect.signature(masking_utils.create_chunked_causal_mask).parameters
    if name == "llama4" and cache == "static" and "block_sequence_ids" not in chunked:
        pytest.skip("this transformers cannot make its masks ahead, on any implementation")


def others(name: str) -> list[str]:
    return ["eager"] if name in NOT_ON_SDPA else ["eager", "sdpa"]


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, padding, calls):
    model, mask = build(name), MASKS[padding]
    inputs = batch_of(name, mask)
    counted = inputs.get("decoder_attention_mask", mask)
    actual = run(model, fa_ext.NAME, inputs, counted)
    assert calls
    biases = [options["bias"].shape[-2] for _, options in calls if "bias" in options]
    if name not in ("llama4", "t5"):  # which have chunks, and a position bias
        assert len(calls) == 2 and all(rows == 1 for rows in biases)
        causal_and_padded = name != "bert" and padding in ("left", "right", "both ends")
        assert all((call == "attention_varlen") == causal_and_padded for call, _ in calls)
        to_bias = padding == "holes" or (name == "bert" and padding in ("left", "both ends"))
        assert bool(biases) == to_bias
    if name == "t5":
        check_position_biases(calls, padding, actual)
    for other in others(name):
        assert_same(actual, run(model, other, inputs, counted))


def check_position_biases(calls, padding: str, gradients: dict) -> None:
    """One for all sequences, but where the keys that they see differ otherwise than by number."""
    for stack in ("encoder", "decoder"):
        weight = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        assert gradients[weight].any(), weight
    encoder, decoder, cross = calls[:2], calls[2::2], calls[3::2]
    assert all(options["bias"].requires_grad for _, options in encoder + decoder)
    for made in (encoder, decoder, cross):
        at_end = padding == "right" and made is not decoder
        for _, options in made:
            assert options["bias"].shape == (1 if at_end or padding == "whole" else 2, 4, S, S)
            assert ("seqused_k" in options) == at_end


@pytest.mark.parametrize("said", ["position_ids", "offsets"])
@pytest.mark.parametrize("name", CAUSAL)
def test_packed_sequences(name, said, calls):
    """Two ways to say it, and no token sees another sequence's."""
    if name == "gpt_oss" and said == "position_ids":
        pytest.skip("the model does not give them to its masks")
    if name == "llama4" and said == "offsets":
        pytest.skip("its chunks are dense masks, which do not go with offsets")
    model = build(name)
    inputs = {"input_ids": tokens(1), "position_ids": PACKED}
    given = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS} if said == "offsets" else {}
    actual = run(model, fa_ext.NAME, inputs | given)
    if name == "llama4":
        assert_same(actual, run(model, "eager", inputs))
        return
    assert [call for call, _ in calls] == ["attention_varlen"] * 2
    for other in [] if name == "gpt_oss" else others(name):
        assert_same(actual, run(model, other, inputs))
    for start, end in zip(CU_SEQLENS, CU_SEQLENS[1:], strict=False):
        alone = run(model, "eager", {"input_ids": tokens(1)[:, start:end]})["logits"]
        torch.testing.assert_close(actual["logits"][:, start:end], alone, rtol=1e-3, atol=1e-3)


def test_packed_sequences_are_recognised():
    """By the function of their mask, which is not transformers' promise."""
    config = build("mistral").config
    config._attn_implementation = fa_ext.NAME
    embeds = torch.empty(1, S, 0)
    create = masking_utils.create_sliding_window_causal_mask
    mask = create(config, embeds, None, past_key_values=None, position_ids=PACKED)
    assert isinstance(mask, fa_ext.Mask) and mask.window == (WINDOW - 1, 0)
    assert torch.equal(mask.cu_seqlens, CU_SEQLENS) and mask.seqused_k is None


@pytest.mark.parametrize("extra", ["and_mask_function", "or_mask_function", "block_sequence_ids"])
def test_packed_sequences_and_more(extra):
    """What is more than packed becomes transformers' mask."""
    config = build("llama").config
    config._attn_implementation = fa_ext.NAME
    more = lambda batch, head, q, kv: (q + kv) % 3 == 0  # noqa: E731
    more = torch.zeros(1, S, dtype=torch.int64) if extra == "block_sequence_ids" else more
    options = {"past_key_values": None, "position_ids": PACKED, extra: more}
    mask = masking_utils.create_causal_mask(config, torch.empty(1, S, 0), None, **options)
    assert mask.dense.shape == (1, 1, S, S) and not mask.causal


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("name", [*CAUSAL, "t5"])
def test_greedy_tokens(name, padding, cache, calls):
    skip_static_chunks(name, cache)
    model = build(name)
    mask = MASKS[padding]
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    options |= {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    found = {}
    for implementation in (fa_ext.NAME, *others(name)):
        use(model, implementation)
        out = model.generate(tokens(), **options)
        found[implementation] = out.sequences, torch.stack(out.logits)
        if implementation == fa_ext.NAME:
            assert len(calls) >= 8 * 2
            if name == "llama" and padding == "whole":  # static: the keys that are there
                assert not any("bias" in given for _, given in calls)
                assert any("seqused_k" in given for _, given in calls) == (cache is not None)
        if name in ("mistral", "gemma2", "gpt_oss"):  # 19 keys, a window of 5
            assert any("Sliding" in type(x).__name__ for x in out.past_key_values.layers)
    for other in others(name):
        assert torch.equal(found[fa_ext.NAME][0], found[other][0])
        torch.testing.assert_close(found[fa_ext.NAME][1], found[other][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_several_tokens_to_a_cache(name):
    """Sq > 1 and Sk > Sq: the queries are the last keys."""
    model, mask = build(name), MASKS["left"]
    inputs, positions = tokens(), (mask.cumsum(-1) - 1).clamp(min=0)
    found = []
    for implementation in (fa_ext.NAME, "eager"):
        use(model, implementation)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            for end in (5, 9, S):
                start = cache.get_seq_length()
                out = model(
                    inputs[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                )
        found.append(out.logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


FUNCTIONS = {
    "causal": masking_utils.create_causal_mask,
    "sliding": masking_utils.create_sliding_window_causal_mask,
    "chunked": masking_utils.create_chunked_causal_mask,
    "bidirectional": masking_utils.create_bidirectional_mask,
    "bidirectional sliding": masking_utils.create_bidirectional_sliding_window_mask,
}


def attend(implementation: str, mask, q, k, v, **options) -> torch.Tensor:
    layer = nn.Module()
    layer.is_causal = True
    layer.num_key_value_groups = 2
    interface = transformers.AttentionInterface()
    return interface[implementation](layer, q, k, v, mask, scaling=0.3, **options)[0]


def cases() -> Iterator[tuple]:
    """kind, keys in the cache, padding, and what changes the mask further."""
    for kind, padding in itertools.product(FUNCTIONS, [None, *MASKS]):
        bidirectional = "bidirectional" in kind
        for past in (0,) if bidirectional else (0, 4, 11):
            yield kind, past, padding, None
            if padding in (None, "left"):
                yield from ((kind, past, padding, extra) for extra in ("and", "or"))
                if kind in ("causal", "sliding"):
                    yield kind, past, padding, "blocks"


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize(("kind", "past", "padding", "extra"), list(cases()))
def test_masks(kind, past, padding, extra):
    """The mask and the attention function together, against SDPA with its own mask."""
    config = transformers.LlamaConfig(**DECODER)
    name = "attention_chunk_size" if kind == "chunked" else "sliding_window"
    setattr(config, name, WINDOW)
    q, k, v = torch.randn(2, 4, S, 16), torch.randn(2, 2, S, 16), torch.randn(2, 2, S, 16)
    options = {}
    if "bidirectional" not in kind:
        cache = transformers.DynamicCache()
        cache.update(k[:, :, :past], v[:, :, :past], 0)
        q = q[:, :, past:]
        options["past_key_values"] = cache if past else None
    if extra == "blocks":
        ids = torch.tensor([-1, -1, 0, 0, 0, -1, 1, 1, -1, -1, 0, -1])
        options["block_sequence_ids"] = ids.expand(2, -1)
    elif extra is not None:
        options[f"{extra}_mask_function"] = lambda batch, head, q, kv: (q + kv) % 3 == 0
    given = None if padding is None else MASKS[padding]
    config._attn_implementation = "eager"
    eager = FUNCTIONS[kind](config, torch.empty(2, q.shape[2], 0), given, **options)
    found = []
    for implementation in (fa_ext.NAME, "sdpa"):
        config._attn_implementation = implementation
        mask = FUNCTIONS[kind](config, torch.empty(2, q.shape[2], 0), given, **options)
        if implementation == fa_ext.NAME:
            with pytest.warns(UserWarning, match="uses its attention mask by itself"):
                tensor = mask + 0.0
            nothing_hidden = torch.zeros(mask.shape)
            assert torch.equal(tensor, nothing_hidden if eager is None else eager)
        if implementation == fa_ext.NAME and extra is None and kind != "chunked":
            assert mask.dense is None
        found.append(attend(implementation, mask, q, k, v, is_causal="bi" not in kind))
    counted = torch.ones(2, S) if padding is None else MASKS[padding]
    actual, expected = (x * counted[:, past:, None, None] for x in found)
    torch.testing.assert_close(actual, expected.nan_to_num(), rtol=1e-4, atol=1e-5)
    if found[0].shape[1] > 1 and padding == "left" and kind == "causal" and extra is None:
        assert not found[0][0, : max(4 - past, 0)].any()  # padded queries


@pytest.mark.parametrize("padding", [None, *MASKS])
def test_cross_attention_to_as_many_keys(padding):
    """The queries at the places of padded keys are tokens."""
    config = transformers.LlamaConfig(**DECODER)
    q, k, v = torch.randn(2, 4, S, 16), torch.randn(2, 2, S, 16), torch.randn(2, 2, S, 16)
    found = []
    for implementation in (fa_ext.NAME, "sdpa"):
        config._attn_implementation = implementation
        mask = masking_utils.create_bidirectional_mask(
            config,
            torch.empty(2, S, 0),
            None if padding is None else MASKS[padding],
            encoder_hidden_states=torch.empty(2, S, 0),
        )
        found.append(attend(implementation, mask, q, k, v, is_causal=False))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_a_mask_of_the_users(name, dtype):
    """A 4-D mask is the whole mask: neither causal nor windows are added."""
    model = build(name)
    mask = torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(3)) < 0.6
    mask |= torch.eye(S, dtype=torch.bool)
    added = torch.where(mask, 0.0, -torch.inf)
    given = {"input_ids": tokens(), "attention_mask": mask if dtype == torch.bool else added}
    actual = run(model, fa_ext.NAME, given | {"attention_mask": given["attention_mask"].to(dtype)})
    assert_same(actual, run(model, "sdpa", given))


def test_by_name():
    """As users say it."""
    config = transformers.LlamaConfig(**DECODER)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=fa_ext.NAME)
    assert model.config._attn_implementation == fa_ext.NAME
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation(fa_ext.NAME)
    assert model.config._attn_implementation == fa_ext.NAME


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("flash_ext::fwd", "AutocastCPU"),
    reason="the ops have no kernels for autocast",
)
def test_autocast():
    """float32 weights, and attention in bfloat16: as near to float32 as SDPA's."""
    model, inputs = build("llama"), batch_of("llama", MASKS["left"])
    expected = run(model, "eager", inputs, MASKS["left"])["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        actual, plain = (
            run(model, name, inputs, MASKS["left"])["logits"] for name in (fa_ext.NAME, "sdpa")
        )
    assert (actual - expected).abs().max() <= 2 * (plain - expected).abs().max()


def eager_and_ours(mask: torch.Tensor | None, past: int = 0) -> Iterator:
    """The causal mask of eager attention, and ours, for S keys of which `past` are in a cache."""
    config = transformers.LlamaConfig(**DECODER)
    cache = transformers.DynamicCache()
    cache.update(torch.empty(2, 2, past, 16), torch.empty(2, 2, past, 16), 0)
    for implementation in ("eager", fa_ext.NAME):
        config._attn_implementation = implementation
        embeds = torch.empty(2, S - past, 0)
        yield masking_utils.create_causal_mask(config, embeds, mask, cache if past else None)


@pytest.mark.parametrize("past", [0, S - 1])
def test_a_mask_is_never_none(past):
    """To a layer that is not causal, or that adds its mask to scores, None would hide nothing."""
    _, mask = eager_and_ours(None, past)
    assert isinstance(mask, fa_ext.Mask) and mask.dense is None


USED_AS_TENSORS = {
    "added to scores": lambda mask, x: x + mask,
    "added in place": lambda mask, x: x.clone().add_(mask),
    "scores added": lambda mask, x: mask + x,
    "subtracted": lambda mask, x: 1.0 - mask,
    "compared": lambda mask, x: mask == 0,
    "below zero": lambda mask, x: torch.where(mask < 0, -torch.inf, x),
    "cut": lambda mask, x: mask[:, :, :, : x.shape[-1] - 1],
    "extended": lambda mask, x: torch.cat([mask, x[:2, :1]], dim=-1),
    "padded": lambda mask, x: F.pad(mask, (0, 2)),
    "repeated": lambda mask, x: mask.repeat(1, 4, 1, 1),
    "of another dtype": lambda mask, x: mask.to(torch.bfloat16),
    "like scores": lambda mask, x: mask.type_as(x),
    "its size": lambda mask, x: (mask.size(), mask.size(-1), mask.dim(), mask.ndim, len(mask)),
    "its dtype": lambda mask, x: (mask.dtype, mask.device, mask.is_floating_point()),
}


@pytest.mark.filterwarnings("ignore:flash_ext")
@pytest.mark.parametrize("use", USED_AS_TENSORS)
@pytest.mark.parametrize("padding", [None, "left"])
def test_masks_used_as_tensors(padding, use):
    eager, mask = eager_and_ours(None if padding is None else MASKS[padding])
    scores = torch.randn(2, 4, S, S)
    expected, actual = (USED_AS_TENSORS[use](x, scores) for x in (eager, mask))
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    else:
        assert actual == expected


def test_masks_are_not_written_to():
    _, mask = eager_and_ours(None)
    with pytest.raises(TypeError, match="flash_ext: this model writes to its attention mask"):
        mask[:, :, 0] = 0.0
    with pytest.raises(TypeError, match="flash_ext: this model writes to its attention mask"):
        mask.masked_fill_(torch.ones(S, S, dtype=torch.bool), 0.0)
    assert not hasattr(mask, "not_of_tensors")


# A model's own attention; a decoder whose layers are not marked causal.
OWN = {
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4, "hidden_size": 32}),
    "bigbird_pegasus": (
        "BigBirdPegasusForCausalLM",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    ),
}


def build_own(name: str) -> nn.Module:
    cls, sizes = OWN[name]
    cls = getattr(transformers, cls)
    torch.manual_seed(0)
    own = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    model = cls(cls.config_class(**sizes, **own)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.share(1 / 2)
@pytest.mark.filterwarnings("ignore:flash_ext")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("padding", ["whole", "left", "right", "holes"])
@pytest.mark.parametrize("name", OWN)
def test_attention_of_their_own(name, padding, compiled):
    model, mask = build_own(name), MASKS[padding]
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    expected = run(model, "eager", inputs, mask)
    if compiled:
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert_same(run(model, fa_ext.NAME, inputs, mask), expected)


@pytest.mark.filterwarnings("ignore:flash_ext")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "t5", *OWN])
def test_beam_search(name, padding, cache):
    model = build_own(name) if name in OWN else build(name)
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    options["cache_implementation"] = cache

    def generated(implementation):
        use(model, implementation)
        return model.generate(tokens(), attention_mask=MASKS[padding], **options)

    try:
        expected = generated("eager")
    except ValueError as error:  # bloom's static cache in transformers 5.20
        pytest.skip(f"this transformers cannot, on eager attention either: {error}")
    assert torch.equal(generated(fa_ext.NAME), expected)


@pytest.fixture
def modeling(monkeypatch):
    """A module with a model whose attention is told `temperature`, and a layer of it."""
    source = types.ModuleType("modeling_of_a_test")

    def eager_attention_forward(module, query, key, value, attention_mask, temperature=None):
        pass

    class Model(transformers.PreTrainedModel):
        pass

    class Layer(nn.Module):
        is_causal = True

    for x in (eager_attention_forward, Model, Layer):
        x.__module__ = source.__name__
        setattr(source, x.__name__, x)
    monkeypatch.setitem(sys.modules, source.__name__, source)
    yield source
    fa_ext._refused_in.pop(source.__name__, None)


def test_what_eager_attention_is_told(modeling):
    """Is refused where it means nothing here; the rest is for others."""
    q, k, v = torch.randn(3, 2, 4, S, 16).unbind()
    fa_ext.attention_forward(modeling.Layer(), q, k, v, None, temperature=None, position_ids=0)
    with pytest.raises(ValueError, match="flash_ext: temperature is not supported"):
        fa_ext.attention_forward(modeling.Layer(), q, k, v, None, temperature=2.0)


@pytest.mark.parametrize("supports_sdpa", [True, False])
def test_none_of_models_that_know_eager_alone(modeling, supports_sdpa):
    """It hides nothing there, whatever the layer says; where SDPA is known it is as with SDPA."""
    modeling.Model._supports_sdpa = supports_sdpa
    q, k, v = torch.randn(3, 2, 4, S, 16).unbind()
    actual, _ = fa_ext.attention_forward(modeling.Layer(), q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=supports_sdpa)
    torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_masks_move_with_their_layers():
    mask = fa_ext.Mask((1, 1, S, S), True, (3, 0), padding=PACKED > 0, cu_seqlens=CU_SEQLENS)
    moved = mask.to(torch.device("meta"))
    assert (moved.causal, moved.window, moved.seqused_k) == (True, (3, 0), None)
    assert moved.padding.is_meta and moved.cu_seqlens.is_meta


def test_float64():
    """Much nearer to SDPA than float32 comes, in the attention function itself."""
    q, k, v = torch.randn(3, 2, 4, S, 16, dtype=torch.float64).unbind()
    torch.testing.assert_close(
        attend(fa_ext.NAME, None, q, k, v), attend("sdpa", None, q, k, v), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_checkpointing_and_dropout(name, calls):
    """The second forward pass of a checkpoint drops the same entries."""
    model = build(name, attention_dropout=0.3)
    inputs = batch_of(name, MASKS["left"])
    evaluated = run(model, fa_ext.NAME, inputs)
    assert {options["dropout_p"] for _, options in calls} == {0.0}
    calls.clear()
    model.train()
    found = []
    for checkpointed in (False, True, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(len(found) // 2)
        found.append(run(model, fa_ext.NAME, inputs))
    assert len(calls) == 2 + 4 + 4 and {options["dropout_p"] for _, options in calls} == {0.3}
    assert_same(found[0], found[1], 1e-5)
    assert not torch.allclose(found[1]["logits"], found[2]["logits"])
    assert not torch.allclose(found[0]["logits"], evaluated["logits"])


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("case", ["causal", "padded", "packed", "offsets"])
def test_compiled(case, calls):
    # Layers are alike, and the compiler traces each.
    model = build("mistral", num_hidden_layers=2 if case == "packed" else 1)
    inputs = batch_of("mistral", MASKS["left"])
    counted = MASKS["left"]
    if case == "causal":
        inputs, counted = {"input_ids": tokens()}, None
    elif case != "padded":
        inputs, counted = {"input_ids": tokens(1), "position_ids": PACKED}, None
    expected = run(model, "eager", inputs, counted)
    if case == "offsets":
        inputs |= {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS}
    forward = model.forward
    model.forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
    actual = run(model, fa_ext.NAME, inputs, counted)
    assert_same(actual, expected)
    # Nothing here is a constant: with other offsets the same graph gives other results.
    if case == "offsets":
        other = torch.tensor([0, 5, 10, 12], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": other, "cu_seq_lens_k": other}
        assert not torch.allclose(run(model, fa_ext.NAME, inputs)["logits"], expected["logits"])


def test_none_is_what_sdpa_takes_it_for():
    """One query sees all keys; of more keys than queries the later ones are an empty cache's."""
    q, k, v = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    for rows, is_causal in ((6, None), (6, False), (1, None)):
        arguments = None, q[:, :, :rows], k, v
        actual, expected = (
            attend(name, *arguments, is_causal=is_causal) for name in (fa_ext.NAME, "sdpa")
        )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_window_without_a_mask():
    q, k, v = torch.randn(3, 2, 4, S, 16).unbind()
    distance = torch.arange(S)[:, None] - torch.arange(S)
    for is_causal, visible in (
        (True, (distance >= 0) & (distance < WINDOW)),
        (False, distance.abs() < WINDOW),
    ):
        actual = attend(fa_ext.NAME, None, q, k, v, sliding_window=WINDOW, is_causal=is_causal)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.3)
        torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    one = attend(fa_ext.NAME, None, q[:, :, -1:], k, v, sliding_window=WINDOW)
    last = F.scaled_dot_product_attention(
        q[:, :, -1:], k[:, :, -WINDOW:], v[:, :, -WINDOW:], scale=0.3
    )
    torch.testing.assert_close(one, last.transpose(1, 2), rtol=1e-4, atol=1e-5)


PADDED = fa_ext.Mask((2, 1, S, S), True, padding=MASKS["left"].bool())
REFUSED = {
    "2-D mask": (MASKS["left"], {}, "four dimensions"),
    "not a mask": ({"full_attention": None}, {}, "four dimensions, got dict"),
    "integer mask": (torch.ones(2, 1, S, S, dtype=torch.int64), {}, "bias|floating"),
    "mask of other keys": (torch.ones(2, 1, S, S + 1, dtype=torch.bool), {}, "seqlen_k"),
    "probabilities": (None, {"output_attentions": True}, "output_attentions"),
    "sparse": (None, {"indices": torch.zeros(1)}, "indices"),
    "offsets of keys alone": (None, {"cu_seq_lens_k": CU_SEQLENS}, "together"),
    "offsets and padding": (PADDED, {"cu_seq_lens_q": CU_SEQLENS}, "together"),
    "offsets and both": (
        PADDED,
        {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS},
        "no padding",
    ),
    "offsets and 4-D": (
        torch.ones(2, 1, S, S, dtype=torch.bool),
        {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS},
        "no 4-D mask",
    ),
    "packed with a bias": (
        fa_ext.Mask((2, 1, S, S), True, cu_seqlens=CU_SEQLENS),
        {"position_bias": torch.zeros(1, 4, S, S)},
        "position_bias",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    mask, options, message = REFUSED[case]
    q, k, v = torch.randn(3, 2, 4, S, 16).unbind()
    with pytest.raises(ValueError, match=message):
        attend(fa_ext.NAME, mask, q, k, v, **options)


def test_refused_shapes():
    q, k, v = torch.randn(3, 2, 4, S, 16).unbind()
    with pytest.raises(ValueError, match="more queries than keys"):
        attend(fa_ext.NAME, None, q, k[:, :, :5], v[:, :, :5])
    padded = fa_ext.Mask((2, 1, S, S), False, padding=MASKS["left"].bool())
    packed = fa_ext.Mask((2, 1, S, S), True, cu_seqlens=CU_SEQLENS)
    causal = fa_ext.Mask((2, 1, S, S), True)
    more = (torch.cat([x, x], dim=2) for x in (k, v))
    for mask, tensors in (
        (packed, (q[:, :, :5], k, v)),
        (packed, (q[:1], k[:1], v[:1])),
        (causal, (q[:, :, :5], k, v)),
        (causal, (q, *more)),
        (padded, (q, k[:, :, :5], v[:, :, :5])),
    ):
        with pytest.raises(ValueError, match="after the mask was made"):
            attend(fa_ext.NAME, mask, *tensors)
    attend(fa_ext.NAME, padded, q[:, :, :5], k, v)  # each query sees the same keys
    model = build("llama")
    use(model, fa_ext.NAME)
    with pytest.raises(ValueError, match=r"of shape \(batch, seqlen_k\)"):
        model(tokens(), attention_mask=torch.ones(2, S, S))


def test_an_older_transformers(monkeypatch):
    def sdpa_mask(batch_size, cache_position, kv_length, **options):
        pass

    monkeypatch.setattr(masking_utils, "sdpa_mask", sdpa_mask)
    with pytest.raises(RuntimeError, match="transformers 5.5 or newer.*q_length"):
        fa_ext.register()


def test_the_interface_of_transformers():
    """What is called here and could move: names, arguments, and the flags of plain masks."""
    assert "flash" not in fa_ext.NAME
    theirs = inspect.signature(masking_utils.sdpa_mask).parameters
    ours = inspect.signature(fa_ext.mask).parameters
    unknown = set(theirs) - set(ours) - {"allow_torch_fix"}
    assert not unknown, f"sdpa_mask has arguments of which mask knows nothing: {unknown}"


def test_import_registers_nothing():
    code = (
        "import flash_ext.integrations.transformers as t, transformers;"
        "assert t.NAME not in transformers.AttentionInterface();"
        "assert t.NAME not in transformers.AttentionMaskInterface()"
    )
    run_python("-c", code, check=True)


def check_accuracy(
    name: str, padding: str, dtype: torch.dtype, device: str, implementation: str = fa_ext.NAME
) -> None:
    """The rule of the tests for whole models: logits, and the gradient of each parameter.

    The errors of a gradient come from all the layers, and which of its few entries has the largest
    is chance. So of gradients it is the error's norm that is at most twice that of the others.
    """
    smooth = {"initializer_range": 0.05}
    if name == "t5":  # a relu, and scores as large as T5's at first, multiply rounding errors
        smooth = {"initializer_factor": 0.3, "feed_forward_proj": "gated-gelu"}
    model = build(name, **smooth).to(device)
    inputs = {key: x.to(device) for key, x in batch_of(name, MASKS[padding]).items()}
    counted = inputs.get("decoder_attention_mask", inputs["attention_mask"])
    ref = {key: x.double() for key, x in run(model, "eager", inputs, counted).items()}
    model.to(dtype)
    actual = run(model, implementation, inputs, counted)
    compared = [x for x in others(name) if x != implementation]
    plain = [run(model, other, inputs, counted) for other in compared]

    def error(x: dict, key: str) -> float:
        return float((x[key].double() - ref[key]).norm())

    pt = max(plain, key=lambda x: error(x, "logits"))
    logits, *sides = ({"logits": x["logits"]} for x in (actual, ref, pt))
    assert_accurate(logits, Expected(*sides), dtype)
    for key, expected in ref.items():
        if "router" in key:  # a softmax of two, whose gradient is a small difference
            continue
        bound = 2 * max(error(x, key) for x in plain) + torch.finfo(dtype).eps * expected.norm()
        assert error(actual, key) <= bound, f"{key}: {error(actual, key):.3e} above {bound:.3e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", ["whole", "left", "right", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_models_on_the_gpu(name, padding, dtype):
    check_accuracy(name, padding, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["whole", "left", "right", "holes"])
def test_t5_under_sdpa(padding):
    """Its position bias becomes an attn_mask with a gradient."""
    with sdpa.activated():
        check_accuracy("t5", padding, torch.bfloat16, "cuda", "sdpa")


def check_generation(name: str, **options) -> None:
    """In bfloat16 near ties fall otherwise: the logits of the first steps are compared."""
    model = build(name).to("cuda", torch.bfloat16)
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options |= {"max_new_tokens": 6, "attention_mask": MASKS["left"].cuda()}
    found = []
    for implementation in (fa_ext.NAME, "eager"):
        use(model, implementation)
        out = model.generate(tokens().cuda(), **options)
        assert all(x.isfinite().all() for x in out.logits)
        found.append((out.sequences, out.logits))
    (sequences, logits), (expected_sequences, expected) = found
    for step, (x, y) in enumerate(zip(logits, expected, strict=True)):
        same = (sequences[:, : S + step] == expected_sequences[:, : S + step]).all(-1)
        torch.testing.assert_close(x[same], y[same], rtol=5e-2, atol=0.05 * float(y.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation_on_the_gpu(name, cache):
    skip_static_chunks(name, cache)
    check_generation(name, cache_implementation=cache, disable_compile=True)


@pytest.mark.gpu
def test_compiled_generation_on_the_gpu():
    check_generation("llama", cache_implementation="static")
