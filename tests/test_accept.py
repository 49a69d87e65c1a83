"""The CUDA kernels accept what the words of a refusal accept, and nothing else.

csrc/api/accept.h has the conditions, flash_ext/cpu/checks.py the words: two lists of one thing.
Would catch a condition that is missing in one of them: a call that reads out of bounds, or one that
is refused without a reason. Here the CPU is csrc's device.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from compiled import load_host_side
from test_errors import (
    BACKWARD_CASES,
    FORWARD_CASES,
    PACKED_BACKWARD_CASES,
    PACKED_CASES,
    Arguments,
    call,
    good,
    good_packed,
    mask,
    named,
    option,
    shaped,
    tensor,
    typed,
)

FP8 = torch.float8_e4m3fn


def transposed(*shape: int) -> Callable[[Arguments], Arguments]:
    """Replaces v by a V^T."""
    return lambda a: {"v": a["v"].new_zeros(shape), "v_transposed": True}


OF_8_BITS = {
    "nothing": (None, option()),
    "out in float16": (None, option(out_dtype=torch.float16)),
    "out in float32": ("out_dtype", option(out_dtype=torch.float32)),
    "int8": (None, lambda a: {name: a[name].to(torch.int8) for name in "qk"}),
    "int8 throughout": ("v", lambda a: {name: a[name].to(torch.int8) for name in "qkv"}),
    "a bias": ("bias", tensor("bias", 1, 1, 1, 1)),
    "dropout": ("dropout_p", option(dropout_p=0.5)),
    "a mask": (None, mask()),
    "batch invariance": ("batch_invariant", option(batch_invariant=True)),
    "one number": (None, tensor("q_descale")),
    "one number in a vector": (None, tensor("k_descale", 1)),
    "two numbers": ("k_descale", tensor("k_descale", 2)),
    "a number a head": (None, tensor("v_descale", 2, 2)),
    "a number a query head": ("q_descale", tensor("q_descale", 2, 4)),
    "blocks of queries": (None, tensor("q_descale", 2, 4, 1)),
    "blocks of queries by key heads": ("q_descale", tensor("q_descale", 2, 2, 1)),
    "too many blocks": ("k_descale", tensor("k_descale", 2, 2, 2)),
    "channels": (None, tensor("v_descale", 2, 2, 32)),
    "too few channels": ("v_descale", tensor("v_descale", 2, 2, 16)),
    "four dimensions": ("v_descale", tensor("v_descale", 2, 2, 32, 1)),
    "descales in bfloat16": ("q_descale", tensor("q_descale", dtype=torch.bfloat16)),
    **{
        f"V^T of shape {shape}": (said, transposed(*shape))
        for said, *shape in (
            (None, 2, 2, 32, 16),
            ("v", 2, 2, 32, 7),
            ("v", 2, 2, 32, 32),
            ("v", 2, 7, 2, 32),
            ("v", 2, 2, 16),
            ("v", 1, 2, 32, 16),
            ("v's head dimension", 2, 2, 300, 16),
        )
    },
    "V^T and its channels": (
        None,
        lambda a: transposed(2, 2, 48, 16)(a) | tensor("v_descale", 2, 2, 48)(a),
    ),
    "V^T and a number a key": (
        "v_descale",
        lambda a: transposed(2, 2, 48, 16)(a) | tensor("v_descale", 2, 2, 16)(a),
    ),
    "V^T with keys apart": (
        "v",
        lambda a: transposed(2, 2, 32, 32)(a) | {"v": a["v"].new_zeros(2, 2, 32, 32)[..., ::2]},
    ),
    "V^T with channels apart": (
        None,
        lambda a: transposed(2, 2, 32, 16)(a) | {"v": a["v"].new_zeros(2, 2, 64, 16)[:, :, ::2]},
    ),
}


PACKED_V_TRANSPOSED = {
    f"{keys} keys": (None if keys == 64 else "v", transposed(2, 32, keys)) for keys in (48, 64, 80)
}
"""Of 14 keys in two sequences: (14 + 4 * 15) // 16 groups."""


OF_8_BIT_KEYS = {
    "nothing": (None, option()),
    "int8": (None, lambda a: {name: a[name].to(torch.int8) for name in "kv"}),
    "q in float16": (None, typed("q", torch.float16)),
    "v in int8": ("v", typed("v", torch.int8)),
    "k in int8": ("v", typed("k", torch.int8)),
    "v in q's dtype": ("v", typed("v", torch.bfloat16)),
    "k in q's dtype": ("v", typed("k", torch.bfloat16)),
    "k in float16": ("k", typed("k", torch.float16)),
    "out in q's dtype": (None, option(out_dtype=torch.bfloat16)),
    "out in float16": ("out_dtype", option(out_dtype=torch.float16)),
    "a bias": ("bias", tensor("bias", 1, 1, 1, 1)),
    "dropout": ("dropout_p", option(dropout_p=0.5)),
    "softcap": (None, option(softcap=2.0)),
    "slopes": (None, tensor("alibi_slopes", 4)),
    "a descale of q": ("q_descale", tensor("q_descale")),
    "one number": (None, tensor("k_descale")),
    "a number a head": (None, tensor("k_descale", 2, 2)),
    "blocks of keys": (None, tensor("k_descale", 2, 2, 1)),
    "too many blocks": ("k_descale", tensor("k_descale", 2, 2, 2)),
    "channels": (None, tensor("v_descale", 2, 2, 32)),
    "too few channels": ("v_descale", tensor("v_descale", 2, 2, 16)),
    "V^T": ("v_transposed", transposed(2, 2, 32, 16)),
    "rows that are not contiguous": ("k", lambda a: {"k": a["k"].mT.contiguous().mT}),
    "another shape": ("v", lambda a: {"v": a["v"][:, :3]}),
}


def good_in_8_bits(device: str) -> Arguments:
    a = good(device)
    return {name: a[name].to(FP8) for name in "qkv"}


MORE = {
    "a window": (None, option(window_left=3, window_right=0)),
    "every variant": (None, option(variant="fa3")),
    "batch invariance": (None, option(batch_invariant=True)),
    "descales": ("q_descale", tensor("q_descale")),
    "out in q's dtype": (None, option(out_dtype=torch.bfloat16)),
    "out in another": ("out_dtype", option(out_dtype=torch.float16)),
    "slopes of heads": (None, tensor("alibi_slopes", 4)),
    "slopes of batches": (None, tensor("alibi_slopes", 2, 4)),
    "bias in float32": (None, tensor("bias", 2, 1, 5, 7)),
    "bias of bools": (None, tensor("bias", 1, 4, 5, 1, dtype=torch.bool)),
    "a mask of intervals": (None, mask()),
    "a mask of bits": (None, mask(words=(1, 1, 1, 1, 128, 4))),
    "a mask of each head": (
        None,
        mask(kv_tiles=(2, 4, 1, 12), q_tiles=(2, 4, 1, 8), words=(2, 4, 128, 4)),
    ),
    "no queries": (None, lambda a: shaped("q", 2, 0, 4, 32)(a) | _no_queries(a)),
    "no batch": (None, lambda a: {n: x.new_zeros((0, *x.shape[1:])) for n, x in a.items()}),
    "a scale of 0": (None, option(scale=0.0)),
    "float16 throughout": (
        None,
        lambda a: {n: a[n].half() for n in ("q", "k", "v", "out", "dout")},
    ),
    "k of 8 bits": ("v", typed("k", FP8)),
    "V^T": ("v_transposed", transposed(2, 2, 32, 16)),
}


def _no_queries(a: Arguments) -> Arguments:
    changes = {n: a[n].new_zeros(2, 0, 4, 32) for n in ("out", "dout")}
    return changes | {n: a[n].new_zeros(2, 4, 0) for n in ("lse", "dlse")}


def compare(op: str, said: str | None, change: Callable, arguments: Arguments) -> None:
    load_host_side()
    changed = arguments | change(arguments)
    why = call(f"refusal_of_{op}", changed)
    assert call(f"refused_{op}", changed) == why
    assert why == "" if said is None else re.match(named(said), why), why


@pytest.mark.parametrize("op", ("fwd", "bwd"))
@pytest.mark.parametrize("case", FORWARD_CASES | MORE)
def test_dense_calls(case: str, op: str) -> None:
    compare(op, *(FORWARD_CASES | MORE)[case], good("cpu"))


@pytest.mark.parametrize("op", ("fwd", "bwd"))
@pytest.mark.parametrize("case", PACKED_CASES)
def test_packed_calls(case: str, op: str) -> None:
    compare(op, *PACKED_CASES[case], good_packed("cpu"))


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_gradients(case: str) -> None:
    compare("bwd", *BACKWARD_CASES[case], good("cpu"))


@pytest.mark.parametrize("case", PACKED_BACKWARD_CASES)
def test_packed_gradients(case: str) -> None:
    compare("bwd", *PACKED_BACKWARD_CASES[case], good_packed("cpu"))


@pytest.mark.parametrize("case", OF_8_BITS)
def test_8_bits(case: str) -> None:
    compare("fwd", *OF_8_BITS[case], good_in_8_bits("cpu"))


@pytest.mark.parametrize("case", PACKED_V_TRANSPOSED)
def test_packed_v_transposed(case: str) -> None:
    a = good_packed("cpu")
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    in_8_bits = {name: a[name].to(FP8) if name in "qkv" else a[name] for name in names}
    compare("fwd", *PACKED_V_TRANSPOSED[case], in_8_bits)


@pytest.mark.parametrize("case", OF_8_BIT_KEYS)
def test_8_bit_keys(case: str) -> None:
    a = good("cpu")
    in_8_bits = {"q": a["q"]} | {name: a[name].to(FP8) for name in "kv"}
    compare("fwd", *OF_8_BIT_KEYS[case], in_8_bits)


@pytest.mark.parametrize("dtype", (FP8, torch.int8), ids=str)
def test_8_bit_keys_have_no_gradients(dtype: torch.dtype) -> None:
    compare("bwd", "k", lambda a: {name: a[name].to(dtype) for name in "kv"}, good("cpu"))


IN_PAGES = {
    "nothing": (None, option()),
    "packed queries": (
        None,
        lambda a: {
            "q": a["q"].flatten(0, 1),
            "cu_seqlens_q": torch.tensor([0, 4, 10], dtype=torch.int32),
        },
    ),
    "offsets of keys": ("cu_seqlens_k", tensor("cu_seqlens_k", 3, dtype=torch.int32)),
    "packed queries of another batch": (
        "page_table",
        lambda a: {
            "q": a["q"].flatten(0, 1),
            "cu_seqlens_q": torch.tensor([0, 10], dtype=torch.int32),
        },
    ),
    "no lengths": ("seqused_k", option(seqused_k=None)),
    "lengths of another batch": ("seqused_k", tensor("seqused_k", 3, dtype=torch.int32)),
    "int64": ("page_table", tensor("page_table", 2, 3, dtype=torch.int64)),
    "a table of another batch": ("page_table", tensor("page_table", 3, 3, dtype=torch.int32)),
    "a table of one dimension": ("page_table", tensor("page_table", 2, dtype=torch.int32)),
    "a table with gaps": (
        "page_table",
        lambda a: {"page_table": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]},
    ),
    "rows of the table apart": (
        None,
        lambda a: {"page_table": torch.zeros(2, 6, dtype=torch.int32)[:, :3]},
    ),
    "no pages of a sequence": (None, tensor("page_table", 2, 0, dtype=torch.int32)),
    "no page": ("k", lambda a: {name: a[name][:0] for name in "kv"}),
    "no page, and none of a sequence": (
        None,
        lambda a: {
            "k": a["k"][:0],
            "v": a["v"][:0],
            "page_table": a["page_table"][:, :0],
        },
    ),
    "pages without rows": ("k", lambda a: {name: a[name][:, :0] for name in "kv"}),
    "v of other pages": ("v", lambda a: {"v": a["v"][1:]}),
    "v of another page size": ("v", lambda a: {"v": a["v"][:, 1:]}),
    "k of three dimensions": ("k", lambda a: {"k": a["k"][0]}),
    "pages with gaps": (None, lambda a: {name: a[name][:, :3] for name in "kv"}),
    "a bias": ("bias", tensor("bias", 1, 1, 1, 1)),
    "dropout": (
        "dropout_p",
        option(dropout_p=0.5, rng_state=torch.zeros(2, dtype=torch.int64)),
    ),
    "slopes": (None, tensor("alibi_slopes", 4)),
    "k and v of 8 bits": (None, lambda a: {name: a[name].to(FP8) for name in "kv"}),
    "all of 8 bits": (None, lambda a: {name: a[name].to(FP8) for name in "qkv"}),
    "V^T": (
        "v_transposed",
        lambda a: {n: a[n].to(FP8) for n in "qkv"} | transposed(5, 2, 32, 16)(a),
    ),
}


def good_in_pages() -> Arguments:
    """Of five pages of four rows, three for each sequence."""
    a = good("cpu")
    heads, dim = a["k"].shape[2:]
    return {
        "q": a["q"],
        "k": torch.randn(5, 4, heads, dim, dtype=a["k"].dtype),
        "v": torch.randn(5, 4, heads, a["v"].shape[-1], dtype=a["v"].dtype),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "seqused_k": torch.tensor([12, 0], dtype=torch.int32),
    }


@pytest.mark.parametrize("case", IN_PAGES)
def test_pages(case: str) -> None:
    compare("fwd", *IN_PAGES[case], good_in_pages())


def test_pages_have_no_gradients() -> None:
    a = good("cpu")
    pages = good_in_pages() | {name: a[name] for name in ("dout", "dlse", "out", "lse")}
    compare("bwd", "page_table", lambda _: {}, pages)
