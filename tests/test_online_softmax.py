"""Rows whose maximum moves from tile to tile, by much.

Would catch an online softmax that keeps a maximum for too long (exp of the difference overflows
fp16 after 16 powers of two, float32 after 128), that passes over a rescale of O or l, that vouches
for a warp by one of its rows, or that starts from a tile in which a row sees no key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_testing import (
    KERNEL_DIMS,
    VARIANTS,
    Expected,
    Inputs,
    Problem,
    assert_accurate,
    attend,
    expected_forward,
    make_inputs,
)
from grids import DEVICE_AND_DIM, DEVICES, HALF_TYPES, cover

# The scores grow by this many powers of two from one block of keys to the next: below and above
# what a kernel may let pass (12), what fp16 holds (16), and what float32 does (128).
STEPS = (1, 11, 12, 13, 17, 40, 127, 129, 300)
BLOCKS = (16, 64, 100, 128)  # of keys; no kernel has tiles of 100
MASKS = (
    {},
    {"causal": True},
    {"window": (90, 20)},  # late rows of a Q tile see nothing of its first K tiles
    {"window": (0, 400)},
    {"seqused_k": (333, 560)},
    {"lengths_q": (260, 0, 77), "lengths_k": (400, 60, 130)},
)
WHO = ("all", "some", "one")  # rows that grow; the others fall, or stay


def growing(
    problem: Problem, step: int, block: int, who: str, device: str
) -> tuple[Problem, Inputs]:
    """Inputs whose scores are step · (block number) · g in base 2, and noise of about 1.

    g is 1 in rows that grow; of the others it is −1, 0 or 0.5. The first column of k holds the
    block's number, that of q holds g, and the scale does the rest.
    """
    inputs = make_inputs(problem, device)
    assert problem.scale is not None
    with torch.no_grad():
        q, k = inputs.q, inputs.k
        queries, keys = (torch.arange(x.shape[-3], device=device) for x in (q, k))
        g = torch.ones(len(queries), device=device)
        if who != "all":
            g = torch.tensor((-1.0, 0.0, 0.5), device=device)[queries % 3]
            g[queries % (7 if who == "some" else 64) == 5] = 1
        q /= problem.scale * problem.head_dim**0.5
        for x, first in ((q, g), (k, keys // block)):
            used = ~x[..., 0].isnan()  # NaN stays in the rows that no sequence has
            x[..., 0] = torch.where(used, first[:, None].to(x.dtype), x[..., 0])
    return problem, inputs


def cases(device: str) -> Iterator[tuple[Problem, int, int, str]]:
    """Every step with every block, masks, head dims, types and rows in rotation."""
    dims = ((64, 32), (24, 24), (40, 40), (128, 64), *KERNEL_DIMS)
    grid = cover(device, STEPS, BLOCKS, WHO)
    for index, (step, block, who) in enumerate(grid):
        d, dv = dims[index % len(dims)]
        yield (
            Problem(
                **{"batch": 2, "seqlen_q": 270, "seqlen_k": 600} | MASKS[index % 11 % len(MASKS)],
                heads_q=4,
                head_dim=d,
                head_dim_v=dv,
                dtype=HALF_TYPES[index % 5 % 2],
                scale=step * math.log(2),
                sink=index % 7 == 3,
                seed=index,
            ),
            step,
            block,
            who,
        )


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("device", "problem", "step", "block", "who"),
    [
        *(("cpu", *case) for case in cases("cpu")),
        *(
            pytest.param("cuda", *case, marks=pytest.mark.gpu)
            for case in (cases("cuda") if "cuda" in DEVICES else ())
        ),
    ],
    ids=str,
)
def test_scores_that_grow(
    problem: Problem, step: int, block: int, who: str, variant: str, device: str
) -> None:
    check_forward(growing, variant, problem, step, block, who, device)


@functools.lru_cache(maxsize=2)
def made(
    make: Callable[..., tuple[Problem, Inputs]], *arguments: object
) -> tuple[Problem, Inputs, Expected]:
    """Cached because the variants are tested in turn."""
    problem, inputs = make(*arguments)
    return problem, inputs, expected_forward(problem, inputs)


def check_forward(
    make: Callable[..., tuple[Problem, Inputs]], variant: str, *arguments: object
) -> None:
    """out and lse by the rule of attention_testing, of what `make` makes of the arguments."""
    problem, inputs, expected = made(make, *arguments)
    out, lse = attend(problem, inputs, variant=variant, return_lse=True)
    forward = {"out": out.detach(), "lse": lse.detach()}
    assert_accurate(forward, expected, problem.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("device", "head_dim"), DEVICE_AND_DIM)
@pytest.mark.parametrize("key", (0, 15, 63, 64, 127, 128, 200, 511, 599))
@pytest.mark.parametrize("height", (15.0, 90.0, 3000.0))
def test_one_key_above_all_others(
    height: float, key: int, head_dim: int, variant: str, device: str
) -> None:
    """A single peak, in any tile: before it nothing may be kept, after it nothing added."""
    check_forward(one_peak, variant, height, key, head_dim, device)


def one_peak(height: float, key: int, head_dim: int, device: str) -> tuple[Problem, Inputs]:
    problem = Problem(1, 200, 600, head_dim=head_dim, scale=1.0, dtype=torch.float16)
    inputs = make_inputs(problem, device)
    with torch.no_grad():
        inputs.q /= 8
        inputs.q[..., 0] = height / 32
        inputs.k[..., 0] = 0
        inputs.k[:, key, :, 0] = 32
    return problem, inputs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("device", "head_dim"), DEVICE_AND_DIM)
@pytest.mark.parametrize("low", (-20.0, -200.0, -50000.0))
def test_a_first_tile_far_below(low: float, head_dim: int, variant: str, device: str) -> None:
    """The contribution of the first tiles vanishes next to the rest; without a rest it does not."""
    for window in ((-1, -1), (40, 0)):
        check_forward(far_below, variant, low, head_dim, window, device)


def far_below(
    low: float, head_dim: int, window: tuple[int, int], device: str
) -> tuple[Problem, Inputs]:
    problem = Problem(1, 300, 300, head_dim=head_dim, window=window, scale=1.0, dtype=torch.float16)
    inputs = make_inputs(problem, device)
    with torch.no_grad():
        inputs.q /= 8
        inputs.q[..., 0] = 16
        inputs.k[..., 0] = 0
        inputs.k[:, :130, :, 0] = low / 16
    return problem, inputs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_infinite_scores(dtype: torch.dtype, variant: str, device: str) -> None:
    """Keys of −inf are hidden, in whichever tile; one of +inf makes its rows NaN, as ∞ − ∞ is."""
    check_forward(with_hidden_keys, variant, dtype, device)
    problem, inputs = with_hidden_keys(dtype, device)
    with torch.no_grad():
        inputs.k[:, 350, :, 0] = torch.inf
    out, lse = attend(problem, inputs, variant=variant, return_lse=True)
    assert out.isnan().all() and not lse.isfinite().any()


def with_hidden_keys(dtype: torch.dtype, device: str) -> tuple[Problem, Inputs]:
    problem = Problem(1, 70, 400, dtype=dtype, scale=1.0)
    inputs = make_inputs(problem, device)
    with torch.no_grad():
        inputs.q[..., 0] = 1
        inputs.k[:, :150, :, 0] = -torch.inf
        inputs.k[:, 300:310, :, 0] = -torch.inf
    return problem, inputs
