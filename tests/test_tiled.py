"""The CPU kernels as algorithms: block sizes, many small tiles, and memory linear in the sequence.

The grid runs them with the block sizes of a real cache, where short sequences are one tile. Here
the on-chip memory is so small that every loop turns many times. Would catch a wrong rescale between
tiles, a tile cut off at the band's edge, and a score matrix that is held as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from attention_testing import (
    CPU_VARIANTS,
    Inputs,
    Problem,
    assert_accurate,
    make_inputs,
    options_of,
    reference_results,
)
from torch.utils._python_dispatch import TorchDispatchMode

from flash_ext import tiled
from flash_ext.cpu.checks import check_forward
from flash_ext.cpu.tiling import SCORES_BYTES, block_sizes, fast_block_sizes
from flash_ext.functional import attention_options
from flash_ext.ops.options import BackwardTensors, Options


def run_tiled(
    problem: Problem, variant: str, on_chip: int | None, inputs: Inputs | None = None
) -> dict[str, torch.Tensor]:
    """out, lse and the gradients, in the order of `attention_testing.run`."""
    inputs = inputs or make_inputs(problem, "cpu")
    cu_seqlens = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    options = Options(
        **attention_options(inputs.q, **options_of(problem), **inputs.options(), **cu_seqlens)
    )
    with torch.no_grad():
        q, k, v = inputs.q, inputs.k, inputs.v
        out, lse = tiled.forward(variant, q, k, v, options, on_chip)
        tensors = BackwardTensors(inputs.dout, inputs.dlse, q, k, v, out, lse)
        gradients = tiled.backward(variant, tensors, options, need_dbias=True, on_chip=on_chip)
    names = ("dq", "dk", "dv", "dbias", "dsink")
    given = {name: x for name, x in zip(names, gradients, strict=True) if x is not None}
    return {"out": out, "lse": lse} | given


@pytest.mark.parametrize("head_dim", (1, 8, 40, 64, 128, 256))
@pytest.mark.parametrize("on_chip", (16, 1024, 48 * 1024, 128 * 1024))
def test_block_sizes_are_the_papers(on_chip: int, head_dim: int) -> None:
    """Algorithm 1, line 1: B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d)."""
    block = math.ceil(on_chip / (4 * head_dim))
    assert block_sizes(on_chip, head_dim) == (min(block, head_dim), block)


MANY_TILES = (
    Problem(1, 37, 53, 4, 2, 8),
    Problem(1, 53, 37, 2, 2, 8, causal=True),
    Problem(2, 40, 64, 2, 1, 16, causal=True),
    Problem(1, 37, 53, 2, 2, 8, window=(5, 3)),
    Problem(1, 53, 37, 2, 1, 8, window=(-1, 0)),
    Problem(1, 53, 37, 2, 1, 8, window=(0, 4)),
    Problem(1, 70, 90, 4, 2, 8, window=(17, -1), dropout_p=0.3),
    Problem(1, 70, 90, 2, 2, 16, causal=True, dropout_p=0.17),
    Problem(1, 37, 53, 2, 2, 8, torch.float32, causal=True),
    Problem(1, 37, 53, 4, 2, 8, head_dim_v=13, causal=True),
    Problem(1, 37, 53, 4, 2, 8, softcap=1.5, alibi="h"),
    Problem(1, 37, 53, 4, 2, 8, bias="1hqk", sink=True),
)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("variant", CPU_VARIANTS)
@pytest.mark.parametrize("on_chip", (1, 300, 1000))
@pytest.mark.parametrize("problem", MANY_TILES, ids=str)
def test_many_small_tiles(problem: Problem, on_chip: int, variant: str) -> None:
    """Down to tiles of one key."""
    if on_chip == 1:
        sizes = {"batch": 20, "seqlen_q": 9, "seqlen_k": 11, "head_dim": 3}
        problem = dataclasses.replace(problem, **sizes)
    assert_accurate(
        run_tiled(problem, variant, on_chip), reference_results(problem, "cpu"), problem.dtype
    )


OPTIONS = (
    {"causal": True},
    {"window": (6, 3)},
    {"head_dim_v": 5},
    {"softcap": 1.5},
    {"alibi": "bh"},
    {"bias": "bhqk"},
    {"bias": "1h1k", "bias_type": "bool"},
    {"bias": "b1q1"},
    {"sink": True},
    {"dropout_p": 0.3},
    {"seqused_k": (9, 0, 40)},
    {"lengths_q": (13, 0, 21), "lengths_k": (17, 5, 0)},
    {"lengths_q": (0, 23, 6), "lengths_k": (4, 15, 19), "bias_short": 4, "tail": 0},
)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("options", [a | b for a, b in itertools.combinations(OPTIONS, 2)], ids=str)
def test_pairs_of_options_in_float64(options: dict) -> None:
    problem = dataclasses.replace(Problem(3, 23, 31, 4, 2, 8, torch.float64), **options)
    ref = reference_results(problem, "cpu").ref
    for variant in CPU_VARIANTS:
        actual = run_tiled(problem, variant, on_chip=200)
        assert list(actual) == list(ref)
        for name, x in actual.items():
            torch.testing.assert_close(x, ref[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", CPU_VARIANTS)
@pytest.mark.parametrize("pattern", tuple(itertools.product("b1", "h1", "q1", "k1")), ids="".join)
def test_every_broadcast_of_a_bias_over_many_tiles(pattern: tuple, variant: str) -> None:
    """Each tile adds its share to dbias, and only that."""
    problem = Problem(2, 23, 31, 4, 2, 8, torch.float64, causal=True, bias="".join(pattern))
    ref = reference_results(problem, "cpu").ref
    actual = run_tiled(problem, variant, on_chip=200)["dbias"]
    torch.testing.assert_close(actual, ref["dbias"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_results_do_not_depend_on_the_tiles_in_float64(variant: str) -> None:
    problem = Problem(1, 50, 70, 4, 2, 8, torch.float64, window=(20, 9), dropout_p=0.2)
    ref = reference_results(problem, "cpu").ref
    for on_chip in (200, 500, 4096):
        for name, x in run_tiled(problem, variant, on_chip).items():
            torch.testing.assert_close(x, ref[name], rtol=1e-11, atol=1e-11)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor made under it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(
    ("variant", "on_chip", "lengths"),
    [("fa1", 8192, (256, 512)), ("fa2", 8192, (256, 512)), ("fa2", None, (2048, 4096))],
)
def test_no_score_matrix_is_ever_held(
    variant: str, on_chip: int | None, lengths: tuple[int, int]
) -> None:
    """The largest tensor doubles with the sequence; a score matrix would quadruple."""
    largest = []
    for seqlen in lengths:
        problem = Problem(1, seqlen, seqlen, 1, 1, 16, causal=True, dropout_p=0.1)
        options = {"softcap": 2.0, "alibi": "h", "bias": "111k", "sink": True}
        problem = dataclasses.replace(problem, **options)
        inputs = make_inputs(problem, "cpu")
        with LargestTensor() as record:
            run_tiled(problem, variant, on_chip, inputs=inputs)
        largest.append(record.elements)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] < lengths[1] ** 2 // 8


class CountProducts(TorchDispatchMode):
    """Counts the matrix products run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.bmm
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("variant", "tiles"), [("auto", 2), ("fa2", 8), ("fa1", 8)])
def test_auto_takes_few_tiles(variant: str, tiles: int) -> None:
    """At the shape of examples/train_gpt.py on a CPU; those of a named variant are the paper's."""
    q, k, v = torch.randn(3, 4, 256, 4, 32)
    options = Options(causal=True, variant=variant)
    runs = check_forward(q, k, v, options)
    with CountProducts() as products:
        out, lse = tiled.forward(runs, q, k, v, options)
        assert products.count == 2 * tiles
        tensors = BackwardTensors(out, None, q, k, v, out, lse)
        tiled.backward(runs, tensors, options, need_dbias=False)
    assert products.count == (2 + 5) * tiles


@pytest.mark.parametrize("heads", (1, 3, 16, 100, 4096))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_fast_block_sizes(heads: int, dtype: torch.dtype) -> None:
    B_r, B_c = fast_block_sizes(heads, dtype)
    assert B_r <= B_c <= 4 * B_r
    held = heads * B_r * B_c * dtype.itemsize
    assert 0.9 * SCORES_BYTES < held <= SCORES_BYTES or (B_r, B_c) == (64, 128)


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_hidden_tiles_are_skipped(variant: str) -> None:
    """A narrow window costs far fewer tile products than no window."""

    counts = []
    for window in ((-1, -1), (-1, 0), (10, 0)):
        problem = Problem(1, 160, 160, 1, 1, 16, window=window)
        with CountProducts() as products:
            run_tiled(problem, variant, 16 * 4 * 16)
        counts.append(products.count)
    full, causal, narrow = counts
    assert causal < 0.6 * full and narrow < 0.25 * full


def test_small_sizes_exhaustively() -> None:
    """Every pair of lengths of up to three tiles, with windows that reach past either end."""
    lengths = (1, 2, 3, 5)
    for seqlen_q, seqlen_k, left, right in itertools.product(
        lengths, lengths, (-1, 0, 2), (-1, 0, 2)
    ):
        problem = Problem(20, seqlen_q, seqlen_k, 2, 1, 4, window=(left, right))
        for variant in CPU_VARIANTS:
            actual = run_tiled(problem, variant, on_chip=32)
            assert_accurate(actual, reference_results(problem, "cpu"), problem.dtype)
