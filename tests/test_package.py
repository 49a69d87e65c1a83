"""The package from outside: import paths, and options that are described once.

Would catch a moved module that breaks an import, and an option that is missing in one of the places
that cannot be derived: the types for checkers, the parameters of `attention_options`, the meaning.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import flash_ext
from flash_ext.__main__ import main
from flash_ext.functional import AttentionOptions, attention_options
from flash_ext.ops.options import ABOUT, FIELDS, MASK_OPTIONS, TENSOR_OPTIONS, VARIANTS, table


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("flash_ext", "attention"),
        ("flash_ext.cpu.tiled", "fa1_forward"),
        ("flash_ext.dropout", "keep_mask"),
        ("flash_ext.flash_attn", "flash_attn_func"),
        ("flash_ext.flash_attn.bert_padding", "index_first_axis_residual"),
        ("flash_ext.flash_attn.flash_attn_interface", "flash_attn_varlen_func"),
        ("flash_ext.flash_attn_interface", "flash_attn_combine"),
        ("flash_ext.functional", "attention_varlen"),
        ("flash_ext.integrations.sdpa", "activate"),
        ("flash_ext.ops", "cuda_missing"),
        ("flash_ext.reference", "online_softmax"),
    ],
)
def test_import_paths(path: str, name: str) -> None:
    assert hasattr(importlib.import_module(path), name)


def test_the_types_for_checkers_are_those_of_the_parameters() -> None:
    parameters = inspect.signature(attention_options).parameters
    types = {name: x.annotation for name, x in parameters.items()}
    for name in ("q", "cu_seqlens_q", "cu_seqlens_k", "unknown"):
        del types[name]
    assert types == {n: x.__forward_arg__ for n, x in AttentionOptions.__annotations__.items()}


def test_the_options_of_attention_are_those_of_the_ops() -> None:
    """But for `window`, which is a pair, and `deterministic`, which may be left to torch."""
    parameters = dict(inspect.signature(attention_options).parameters)
    left, right = parameters.pop("window").default
    assert parameters.pop("deterministic").default is None
    del parameters["unknown"]
    del parameters["q"], parameters["mask"]  # whose tensors are the ops'
    options = {name: x.default for name, x in FIELDS.items()}
    assert (left, right) == (options.pop("window_left"), options.pop("window_right"))
    for name in ("deterministic", "page_table", *MASK_OPTIONS):  # which attention does not have
        del options[name]
    assert {name: x.default for name, x in parameters.items()} == options


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_is_described(name: str) -> None:
    about = ABOUT[name]
    assert about.meaning and "|" not in about.meaning
    assert about.variants and set(about.variants) <= set(VARIANTS)
    assert bool(about.dims) == (name in TENSOR_OPTIONS)
    assert name in TENSOR_OPTIONS or about.allows(FIELDS[name].default)


def test_the_table_of_options(capsys: pytest.CaptureFixture) -> None:
    assert main(["--options"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\n".join(lines) == table() and len(lines) == len(FIELDS) + 2
    assert "| `dropout_p` | float | `0.0` | all |" in table()
    assert "| `softcap` | float | `0.0` | all; fa3 up to 2048 |" in table()


def test_an_unknown_option_is_named_by_every_function() -> None:
    q = torch.randn(1, 5, 2, 64)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    for function, tensors in (
        (flash_ext.attention, (q, q, q)),
        (flash_ext.attention_varlen, (q[0], q[0], q[0], cu_seqlens, cu_seqlens)),
        (flash_ext.explain, (q, q, q)),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'causl'.*mean 'causal'"):
            function(*tensors, causl=True)
        with pytest.raises(TypeError, match="'is_causal'; here it is causal, aligned"):
            function(*tensors, is_causal=True)
