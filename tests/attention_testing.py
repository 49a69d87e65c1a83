"""What every numerical test shares: a problem, its poisoned inputs, the yardstick and the rule.

A `Problem` fixes the numbers of one attention call; `run` puts it through `flash_ext.attention`
and autograd; `yardstick` computes the same in float64 and in the input type; `assert_accurate`
applies the rule

    max|x - ref|  <=  2 max|pt - ref|  +  2 max|(ref + 0.3 - 0.3) - ref|

to out, lse and every gradient. `ref` is standard attention in float64 on the upcast inputs, `pt`
standard attention in the input type. The second term is evaluated in the input type, which makes
it that type's rounding error: without it a result that `pt` happens to hit exactly would have to
be exact too.

Every input is a view into a larger buffer filled with NaN and every output starts as NaN, so that
a stray read, or an element that is never written, reaches the result as a NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import flash_ext
import flash_ext.reference
from flash_ext import VARIANTS

__all__ = [
    "LAYOUTS",
    "VARIANTS",
    "Problem",
    "assert_accurate",
    "assert_all_bitwise_equal",
    "assert_bitwise_equal",
    "check",
    "dense_mask",
    "make_inputs",
    "nan_filled_outputs",
    "options_of",
    "run",
    "yardstick",
]

LAYOUTS = (
    "bshd",  # rows padded with NaN, strides and offset multiples of 8 elements
    "bhsd",  # SDPA's layout, seen through a transpose
    "sbhd",  # sequence first, batch second
    "packed",  # q, k and v are slices of one projection's output
    "odd_row",  # row stride not a multiple of 8 elements
    "odd_offset",  # first element not aligned to 16 bytes
    "expanded_heads",  # one K/V head broadcast over all: head stride 0
    "expanded_batch",  # one K/V sequence broadcast over the batch: batch stride 0
)

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call with its gradients, whatever kernel computes it.

    `loss` says which outputs reach the loss: "out", "lse" or "both". `logit_gain` multiplies q.
    """

    batch: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    dropout_p: float = 0.0
    layout: str = "bshd"
    loss: str = "both"
    logit_gain: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        """A test id: the size always, the rest where it differs from the default."""
        words = [
            str(self.dtype).removeprefix("torch."),
            f"b{self.batch}",
            f"s{self.seqlen_q}x{self.seqlen_k}",
            f"h{self.heads_q}x{self.heads_k}",
            f"d{self.head_dim}",
        ]
        if self.causal:
            words.append("causal")
        if self.window != (-1, -1):
            words.append(f"window{self.window[0]}_{self.window[1]}")
        for field in ("scale", "dropout_p", "layout", "loss", "logit_gain"):
            value = getattr(self, field)
            if value != getattr(Problem, field):
                words.append(f"{field}_{value}")
        return "-".join(words)

    def most_visible_keys(self) -> int:
        """The most keys that any one query sees."""
        left, right = (side if side >= 0 else self.seqlen_q + self.seqlen_k for side in self.window)
        right = 0 if self.causal else right
        offset = self.seqlen_k - self.seqlen_q
        # The number of keys is concave in the query: it peaks at an end or where a bound sets in.
        queries = (0, self.seqlen_q - 1, left - offset, self.seqlen_k - 1 - right - offset)
        diagonals = (min(max(i, 0), self.seqlen_q - 1) + offset for i in queries)
        return max(min(d + right, self.seqlen_k - 1) - max(d - left, 0) + 1 for d in diagonals)

    def well_conditioned(self) -> Problem:
        """This problem made fit for the rule, which compares the largest errors of two methods.

        The largest of a handful of errors is a matter of luck, so small problems get more batches.
        And where no query sees more than one key, dq and dk through out alone cancel to exactly 0
        in standard attention, which leaves the rule no room for float32 rounding: the loss then
        uses lse too, and nothing is dropped, because delta = rowsum(dO * O) sees O rounded and
        dropout's factor enlarges what does not cancel. `test_one_visible_key` covers that case.
        """
        rows = min(self.seqlen_q * self.heads_q, self.seqlen_k * self.heads_k)
        batch = self.batch
        if self.batch and rows:
            batch = max(batch, min(100, -(-2000 // (rows * self.head_dim))))
        one_key = self.most_visible_keys() <= 1
        loss = "both" if one_key and self.loss == "out" else self.loss
        dropout_p = 0.0 if one_key else self.dropout_p
        return dataclasses.replace(self, batch=batch, loss=loss, dropout_p=dropout_p)


@dataclasses.dataclass
class Inputs:
    """q, k, v require a gradient; dout and dlse are None where the loss does not use them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None
    dlse: torch.Tensor | None
    rng_state: torch.Tensor | None


def _poisoned(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def _view_in_poison(
    batch: int, seqlen: int, heads: int, dim: int, layout: str, device: str, dtype: torch.dtype
) -> torch.Tensor:
    """A (batch, seqlen, heads, dim) view of the given layout, every element around it NaN."""
    padded_dim = (dim + 7) // 8 * 8 + 8
    if layout == "bhsd":
        buffer = _poisoned((batch, heads, seqlen + 2, padded_dim), device, dtype)
        return buffer[:, :, 1 : 1 + seqlen, :dim].transpose(1, 2)
    if layout == "sbhd":
        buffer = _poisoned((seqlen + 2, batch, heads, padded_dim), device, dtype)
        return buffer[1 : 1 + seqlen, :, :, :dim].transpose(0, 1)
    if layout == "odd_row":
        buffer = _poisoned((batch, seqlen + 2, heads * dim + 3 + dim % 2), device, dtype)
        return buffer[:, 1 : 1 + seqlen, : heads * dim].unflatten(2, (heads, dim))
    if layout == "odd_offset":
        elements = batch * seqlen * heads * dim
        buffer = _poisoned((elements + 64,), device, dtype)
        return buffer[1 : 1 + elements].view(batch, seqlen, heads, dim)
    buffer = _poisoned((batch, seqlen + 2, heads + 1, padded_dim), device, dtype)
    return buffer[:, 1 : 1 + seqlen, :heads, :dim]


def _views(problem: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The storage of q, k and v as the problem's layout wants it, still NaN."""
    p = problem
    if p.layout == "packed":
        heads = p.heads_q + 2 * p.heads_k
        seqlen = max(p.seqlen_q, p.seqlen_k)
        buffer = _poisoned((p.batch, seqlen + 1, heads, p.head_dim), device, p.dtype)
        q, k, v = buffer.split((p.heads_q, p.heads_k, p.heads_k), dim=2)
        return q[:, : p.seqlen_q], k[:, : p.seqlen_k], v[:, : p.seqlen_k]
    base = "bshd" if p.layout.startswith("expanded") else p.layout
    one = functools.partial(_view_in_poison, layout=base, device=device, dtype=p.dtype)
    batch_k = 1 if p.layout == "expanded_batch" else p.batch
    heads_k = 1 if p.layout == "expanded_heads" else p.heads_k
    q = one(p.batch, p.seqlen_q, p.heads_q, p.head_dim)
    k, v = (one(batch_k, p.seqlen_k, heads_k, p.head_dim) for _ in range(2))
    return q, k, v


def make_inputs(problem: Problem, device: str) -> Inputs:
    """Normally distributed inputs, the same numbers on every device and in every layout."""
    p = problem
    generator = torch.Generator().manual_seed(p.seed)

    def fill(view: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(view.shape, generator=generator) * gain
        return view.copy_(numbers.to(device=device, dtype=view.dtype))

    views = _views(p, device)
    q, k, v = (fill(view, gain) for view, gain in zip(views, (p.logit_gain, 1.0, 1.0), strict=True))
    expanded = (p.batch, p.seqlen_k, p.heads_k, p.head_dim)
    k, v = k.expand(expanded), v.expand(expanded)
    base = "bshd" if p.layout.startswith("expanded") or p.layout == "packed" else p.layout
    dout = _view_in_poison(p.batch, p.seqlen_q, p.heads_q, p.head_dim, base, device, p.dtype)
    dout = fill(dout)
    dlse = torch.randn((p.batch, p.heads_q, p.seqlen_q), generator=generator).to(device)
    return Inputs(
        *(x.detach().requires_grad_() for x in (q, k, v)),
        dout=dout if p.loss != "lse" else None,
        dlse=dlse if p.loss != "out" else None,
        rng_state=torch.tensor([0x1234_5678_9ABC + p.seed, 1 << 33 | 77], device=device)
        if p.dropout_p
        else None,
    )


def options_of(problem: Problem) -> dict[str, object]:
    """The keyword options of `flash_ext.attention` that are not tensors."""
    return {
        "scale": problem.scale,
        "causal": problem.causal,
        "window": problem.window,
        "dropout_p": problem.dropout_p,
    }


@contextmanager
def nan_filled_outputs() -> Iterator[None]:
    """Fresh floating-point memory is NaN inside this block, on every device."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _gradients(
    out: torch.Tensor, lse: torch.Tensor, inputs: Inputs, **more: object
) -> tuple[torch.Tensor, ...]:
    """d(<out, dout> + <lse, dlse>) with respect to q, k, v."""
    pairs = [(out, inputs.dout), (lse, inputs.dlse)]
    outputs, grads = zip(*((x, g) for x, g in pairs if g is not None), strict=True)
    return torch.autograd.grad(outputs, (inputs.q, inputs.k, inputs.v), grads, **more)


def run(
    problem: Problem,
    variant: str,
    device: str,
    *,
    deterministic: bool = False,
    inputs: Inputs | None = None,
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of the problem by one variant, through the public function."""
    inputs = inputs or make_inputs(problem, device)
    with nan_filled_outputs():
        out, lse = flash_ext.attention(
            inputs.q,
            inputs.k,
            inputs.v,
            **options_of(problem),
            rng_state=inputs.rng_state,
            deterministic=deterministic,
            variant=variant,
            return_lse=True,
        )
        grads = _gradients(out, lse, inputs)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def _standard_attention(
    problem: Problem, device: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Standard attention and its gradients with everything in `dtype`."""
    p = problem
    inputs = make_inputs(p, device)
    for name in ("q", "k", "v"):
        tensor = getattr(inputs, name).detach().to(dtype, copy=True)
        setattr(inputs, name, tensor.requires_grad_())
    if inputs.dout is not None:
        inputs.dout = inputs.dout.to(dtype)
    out, lse = flash_ext.reference.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        **options_of(p),
        rng_state=inputs.rng_state,
    )
    if inputs.dlse is not None:
        inputs.dlse = inputs.dlse.to(lse.dtype)
    grads = _gradients(out, lse, inputs, allow_unused=True)
    grads = [
        torch.zeros_like(x) if g is None else g
        for x, g in zip((inputs.q, inputs.k, inputs.v), grads, strict=True)
    ]
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


@functools.lru_cache(maxsize=2)
def yardstick(problem: Problem, device: str) -> tuple[dict, dict]:
    """(float64 results, input-type results); cached because the variants are tested in turn."""
    return (
        _standard_attention(problem, device, torch.float64),
        _standard_attention(problem, device, problem.dtype),
    )


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def assert_accurate(
    actual: dict[str, torch.Tensor],
    ref: dict[str, torch.Tensor],
    pt: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Apply the rule of this file to every result; never a NaN, and the same -inf in lse."""
    for name, x in actual.items():
        expected, plain = ref[name], pt[name].double()
        assert x.shape == expected.shape, f"{name}: shape {x.shape}, expected {expected.shape}"
        assert x.dtype == (torch.float32 if name == "lse" and dtype != torch.float64 else dtype)
        x = x.double()
        assert not x.isnan().any(), f"{name}: {int(x.isnan().sum())} of {x.numel()} are NaN"
        if name == "lse":
            masked = expected == -torch.inf
            assert torch.equal(x == -torch.inf, masked), "lse is -inf in the wrong rows"
            x, expected, plain = (t.masked_fill(masked, 0.0) for t in (x, expected, plain))
        rounded = expected.to(dtype)
        rounding = _largest((rounded + 0.3 - 0.3).double() - rounded.double())
        bound = 2 * _largest(plain - expected) + 2 * rounding
        error = _largest(x - expected)
        assert error <= bound, f"{name}: max error {error:.3e} is above the bound {bound:.3e}"
        if name == "lse":  # lse is a float32 result, whatever the input type
            bound = 1e-4 * (1 + _largest(expected))
            assert error <= bound, f"lse: max error {error:.3e} is not float32 ({bound:.3e})"


def check(problem: Problem, variant: str, device: str, *, deterministic: bool = False) -> None:
    """Run one problem on one variant and hold every result against the yardstick."""
    actual = run(problem, variant, device, deterministic=deterministic)
    ref, pt = yardstick(problem, device)
    assert_accurate(actual, ref, pt, problem.dtype)
    if problem.loss == "lse":
        assert not actual["dv"].any(), "lse does not depend on v: dv must be exactly 0"


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Same bits, not merely equal values: 0 and -0 differ, a NaN equals itself."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    same = actual.contiguous().view(bits) == expected.contiguous().view(bits)
    assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} elements differ"


def assert_all_bitwise_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    for name in expected:
        assert_bitwise_equal(actual[name], expected[name], name)


def dense_mask(
    seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int], device: str = "cpu"
) -> torch.Tensor:
    """(seqlen_q, seqlen_k) bool, True where query i sees key j, written from the contract.

    i + off - left <= j <= i + off + right with off = seqlen_k - seqlen_q; -1 is no limit on that
    side and causal means right = 0.
    """
    left, right = window
    if causal:
        right = 0
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    column = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= column >= diagonal - left
    if right >= 0:
        visible &= column <= diagonal + right
    return visible
