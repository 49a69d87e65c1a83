"""Small models of transformers' architectures with random weights, and inputs for them.

Nothing here knows an architecture: a configuration's defaults are made small by the names of their
fields, and a model's inputs follow from the signature of its forward function.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.pytorch_utils import Conv1D

BATCH, SEQLEN, LAYERS, WIDTH, HEADS, HEAD_DIM = 2, 16, 2, 64, 4, 16
IMAGE, PATCH = 32, 8
TOKENS = range(5, 40)  # of the inputs; special tokens are others
VOCABULARY = 64
MOST_PARAMETERS = 5_000_000

_SMALL: list[tuple[str, int | None]] = [
    # What part of a field's name says how large it may be: the first that is found. None: as it is.
    (r"vocab", VOCABULARY),
    (r"chunk_size$|d_state|state_size", 16),
    (r"conv_|feat_extract|group|_id$|_ids$|_index$|_token$|codebook|mamba|ssm", None),
    (r"(key_value|kv)_?(attention_)?heads|kv_heads", HEADS),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"head_dim|d_kv|kv_channels|head_size|dim_head|d_head", HEAD_DIM),
    (r"heads?$", HEADS),
    (r"layers$|layer$|depth$|num_blocks", LAYERS),
    (r"position|n_ctx|max_seq", 64),
    (r"experts_per_tok|top_?k|expert", 2),
    (r"intermediate|ffn|d_ff|n_inner|mlp_dim", 48),
    (r"sliding_window|attention_chunk|attention_window", 6),
    (r"image_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_channels|in_channels|in_chans", 3),
    (r"hidden_size|d_model|n_embd|embed|dim$|size$|rank$|channels$", WIDTH),
]


def without_docstring(decorated: Any = None, **_: object) -> Any:
    return (lambda x: x) if decorated is None else decorated


# To make the docstrings of a model costs about as much as to run a small one.
transformers.utils.auto_docstring = without_docstring


class TooLarge(ValueError):
    """A model has many parameters although its configuration was made small."""


def classes() -> dict[str, str]:
    """The classes of each architecture, {"BloomForCausalLM": "bloom", ...}.

    They are its language models, decoders and encoder-decoders, otherwise its body.
    """
    heads = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
    found: dict[str, str] = {}
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        named = [getattr(modeling_auto, mapping).get(kind) for mapping in heads]
        if not any(named):
            named = [modeling_auto.MODEL_MAPPING_NAMES.get(kind)]
        for name in filter(None, named):
            found.setdefault(name if isinstance(name, str) else name[0], kind)
    return found


def small_config(cls: type, layers: int | None = LAYERS) -> Any:
    """A configuration of this class whose sizes are small; layers None: as many as it has."""
    default = cls()
    changes: dict[str, Any] = {}
    special = itertools.count(max(TOKENS) + 1)
    heads = vars(default).get("num_attention_heads")
    grouped = vars(default).get("num_key_value_heads") not in (None, heads)
    for name, value in vars(default).items():
        if isinstance(value, transformers.PreTrainedConfig):
            changes[name] = small_config(type(value), layers)
        elif name.startswith("_") or isinstance(value, bool):
            continue
        elif name.endswith("token_id") and isinstance(value, int) and value >= min(TOKENS):
            changes[name] = next(special)
        elif name == "image_size" and isinstance(value, (tuple, list)):
            changes[name] = [IMAGE] * len(value)
        elif isinstance(value, float) and "drop" in name:
            changes[name] = 0.0
        elif isinstance(value, int):
            small = next((x for part, x in _SMALL if re.search(part, name)), None)
            if grouped and name == "num_key_value_heads":
                small = HEADS // 2
            if small == LAYERS and "layer" in name:
                small = layers
            if small is not None and value > small:
                changes[name] = small
        elif name == "head_dim" and value is None:
            changes[name] = HEAD_DIM
        elif name == "rope_parameters" and isinstance(value, dict) and "rope_type" in value:
            rotated = int(HEAD_DIM * value.get("partial_rotary_factor", 1)) // 2
            rest = rotated // 4
            changes[name] = value | {"mrope_section": [rotated - 2 * rest, rest, rest]}
    types = vars(default).get("layer_types")
    if types and layers is not None:  # each kind of layer once
        kinds = list(dict.fromkeys(types))
        number = max(LAYERS, len(kinds))
        changes["layer_types"] = [kind for kind, _ in zip(itertools.cycle(kinds), range(number))]
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            if name in changes:
                changes[name] = number
    return cls(**changes)


@functools.lru_cache(maxsize=1)  # a model is built for each implementation in turn
def _config(name: str) -> Any:
    """Of the model of this class. To be copied: models change it."""
    cls = getattr(transformers, name)
    try:
        return small_config(cls.config_class)
    except Exception:  # what lists its layers
        return small_config(cls.config_class, layers=None)


@contextlib.contextmanager
def limited_parameters() -> Iterator[None]:
    """Refuses a model that is too large, before its parameters have values, and so memory."""
    found: set[nn.Parameter] = set()
    size = 0

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal size
        size += 0 if parameter in found else parameter.numel()
        found.add(parameter)
        if size > MOST_PARAMETERS:
            raise TooLarge(f"more than {MOST_PARAMETERS:,} parameters")

    hook = nn.modules.module.register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        hook.remove()


def build(name: str, implementation: str) -> nn.Module:
    """The model, in float32 and in evaluation mode; the same weights for each implementation.

    Raises:
        Exception: whatever stops this architecture from being built so.
    """
    cls, config = getattr(transformers, name), copy.deepcopy(_config(name))
    config._attn_implementation = implementation
    torch.manual_seed(0)
    with limited_parameters():
        model = cls(config).eval()
    generator = torch.Generator().manual_seed(1)
    # Weights as large as trained ones: attention that differs shows in the outputs.
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            fan_in = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
            nn.init.normal_(module.weight, std=1.5 * fan_in**-0.5, generator=generator)
    return model


def padding() -> Tensor:
    """The first row is padded at its start, the second at its end."""
    mask = torch.ones(BATCH, SEQLEN, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, -3:] = 0
    return mask


def _field(config: Any, *names: str, default: int) -> int:
    """The first of these fields that a configuration, or one inside it, has."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (tuple, list)) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            found = _field(getattr(config, name), *names, default=-1)
            if found != -1:
                return found
    return default


def inputs_of(model: nn.Module, padded: bool = False, other: bool = False) -> Iterator[dict]:
    """Inputs that a model might take, the plainest first; other: with other padding tokens."""
    parameters = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(2)
    hidden = padding() == 0
    given: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    for name in ("input_ids", "decoder_input_ids"):
        shape = BATCH, SEQLEN
        ids = torch.randint(min(TOKENS), max(TOKENS), shape, generator=generator)
        if name in parameters:
            mask = name.replace("input_ids", "attention_mask")
            if padded and mask in parameters:
                ids[hidden] = max(TOKENS) if other else min(TOKENS)
                given[mask] = padding()
            given[name] = ids
    if "bbox" in parameters:
        given["bbox"] = torch.zeros(BATCH, SEQLEN, 4, dtype=torch.long)
    if "input_ids" in given:
        yield given
    more: dict[str, tuple[int, ...]] = {}
    config = model.config
    size = _field(config, "image_size", default=IMAGE)
    more["pixel_values"] = (
        BATCH,
        _field(config, "num_channels", "in_channels", default=3),
        *[size] * 2,
    )
    bins = _field(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    frames = 2 * _field(config, "max_source_positions", default=32)
    more["input_features"] = BATCH, bins, frames
    more["input_values"] = BATCH, 3200
    for name, shape in more.items():
        if name not in parameters:
            continue
        values = torch.randn(shape, generator=generator)
        yield given | {name: values}
        if "features" in name:
            yield given | {name: values.transpose(1, 2)}


def tensors(output: Any, prefix: str = "") -> dict[str, Tensor]:
    """The floating tensors of an output by where they are in it."""
    if isinstance(output, Tensor):
        return {prefix: output} if output.is_floating_point() else {}
    items: Any = output.items() if hasattr(output, "items") else ()
    if isinstance(output, (tuple, list)):
        items = enumerate(output)
    found: dict[str, Tensor] = {}
    for key, value in items:
        found |= tensors(value, f"{prefix}.{key}")
    return found
