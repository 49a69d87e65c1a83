"""NaN in, NaN out: in the rows that standard attention has it in, and only there.

Would catch a NaN that is lost, in a maximum or beside a far larger score; one that spreads to other
rows of a tile, to another head or another split of the keys; and kernels that compute a NaN row
again, as if its scores were too large, which costs more than the call.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from grids import DEVICE_AND_DIM

import flash_ext

VARIANTS = flash_ext.VARIANTS
SHAPES = {  # queries, keys, heads of q, heads of k
    "tiles": (300, 300, 4, 2),
    "few queries": (5, 1100, 4, 2),
    "splits": (70, 4000, 2, 2),
    "packed heads": (9, 2100, 16, 2),
}


def inputs(shape: str, head_dim: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    queries, keys, heads_q, heads_k = SHAPES[shape]
    return [
        torch.randn(2, rows, heads, head_dim, generator=generator).bfloat16().to(device)
        for rows, heads in ((queries, heads_q), (keys, heads_k), (keys, heads_k))
    ]


def assert_as_standard(
    variant: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
) -> None:
    """The same NaN as standard attention's, and the rest of out and lse right."""
    if q.device.type == "cpu" and variant not in flash_ext.CPU_VARIANTS:
        pytest.skip("not on the CPU")
    actual = flash_ext.attention(q, k, v, variant=variant, return_lse=True, **options)
    expected = flash_ext.reference.attention(q.double(), k.double(), v.double(), **options)
    assert 0 < expected[0].isnan().sum() < expected[0].numel()
    for x, ref, name in zip(actual, expected, ("out", "lse"), strict=True):
        where = ref.isnan()
        assert torch.equal(x.isnan(), where), f"{name}: NaN in the wrong place"
        error = (x.double() - ref).masked_fill(where, 0.0).abs()
        assert (error <= 0.02 * (1 + ref.nan_to_num().abs())).all(), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("device", "head_dim"), DEVICE_AND_DIM)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", "qkv")
def test_a_nan_stays_in_its_rows(
    name: str, shape: str, head_dim: int, variant: str, device: str
) -> None:
    """In one element of a row of q, k or v, at the end, in the middle and at the beginning."""
    tensors = dict(zip("qkv", inputs(shape, head_dim, device), strict=True))
    rows = tensors[name].shape[1]
    for row in (rows - 1, rows // 2, 0):
        x = tensors[name].clone()
        x[1, row, 0, 5] = torch.nan
        assert_as_standard(variant, **(tensors | {name: x}))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", "qk")
def test_a_nan_under_a_mask(name: str, variant: str, device: str) -> None:
    """Queries that do not see the key are right."""
    tensors = dict(zip("qkv", inputs("tiles", 64, device), strict=True))
    tensors[name][1, 150, 0, 5] = torch.nan
    assert_as_standard(variant, **tensors, causal=True)
    if name == "k":
        assert_as_standard(variant, **tensors, window=(20, 7))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key", (0, -1))
def test_a_nan_beside_large_scores(key: int, shape: str, variant: str, device: str) -> None:
    """Large scores of other keys do not hide it: neither those of the row's end, which come first,
    nor others that are far larger. Rows of large scores without NaN are right, too."""
    q, k, v = inputs(shape, 64, device)
    q[0, ::3] *= 1e6
    k[1, 1 + key, 0] *= 1e6  # the key that is seen last, or first
    k[1, key, 0, 9] = torch.nan
    assert_as_standard(variant, q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ("fa2", "fa3"))
@pytest.mark.parametrize("name", "qk")
def test_a_nan_costs_no_time(
    name: str, variant: str, claim_gpu_memory: Callable[[int], None]
) -> None:
    """At 32 heads of 65,536 tokens: every later query of its head sees a NaN of k."""
    claim_gpu_memory(6 * 2 * 32 * 65536 * 128)
    x = {n: torch.randn(1, 65536, 32, 128, device="cuda", dtype=torch.bfloat16) for n in "qkv"}
    with_nan = x | {name: x[name].clone()}
    with_nan[name][0, 30000, 7, 3] = torch.nan

    def time(inputs: dict[str, torch.Tensor]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        flash_ext.attention(**inputs, causal=True, variant=variant)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    # In turns, and several times, since other tests may share the GPU.
    assert min(time(with_nan) / time(x) for _ in range(10)) < 1.5
