"""What every numerical test shares: a problem, its poisoned inputs, the reference and the rule.

A `Problem` fixes the numbers of one attention call; `run` puts it through `flash_ext.attention`
and autograd; `reference_results` has the same by standard attention: `ref` in float64 on the upcast
inputs, `pt` in the input type. `assert_accurate` applies the rule to out, lse and every gradient:

    max|x - ref|  <=  2 max|pt - ref|  +  2 max|(ref + 0.3 - 0.3) - ref|

over all of a tensor, where the second term is evaluated in the input type, which makes it that
type's rounding error: without it a result that `pt` happens to hit exactly would have to be exact
too. Rows may be of very different size: of a causal mask the first are much larger than the last,
which could be anything within this bound. So

    max|x - ref|  <=  2 max|pt - ref|  +  2 eps max(size)

over each row, and

    1 - 2<x, ref> / (<x, x> + <ref, ref>)

which a small error in one direction everywhere makes large, is at most twice that of pt, but for
rounding. `size` is what a result would be if nothing in it cancelled (`sizes`).

Every input is a view into a larger buffer filled with NaN and every output starts as NaN, so that
a stray read, or an element that is never written, reaches the result as a NaN. Rows that no
sequence uses (past cu_seqlens[-1], keys past seqused_k, the bias there) are NaN as well.

`unsupported_reason` says which variant runs which problem where, from what the package declares,
`backward_of` whose kernels then compute the gradients. conftest.py leaves out the tests that the
former rules out, and tests/test_variants.py holds the kernels against both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
import flash_ext.reference
from flash_ext import CPU_VARIANTS, KERNEL_DIMS, VARIANTS
from flash_ext.ops.options import (
    ABOUT,
    DESCALE_ROWS,
    FP8,
    FP8_VARIANTS,
    QK_8_BITS,
)

__all__ = [
    "CPU_VARIANTS",
    "KERNEL_DIMS",
    "SQUARE_DIMS",
    "LAYOUTS",
    "UNALIGNED_LAYOUTS",
    "VARIANTS",
    "FP8",
    "Expected",
    "Inputs",
    "Problem",
    "assert_accurate",
    "assert_all_bitwise_equal",
    "assert_bitwise_equal",
    "assert_is_sink",
    "attend",
    "backward_of",
    "check",
    "dense_mask",
    "device_unsupported_reason",
    "expected_results",
    "fastest",
    "make_inputs",
    "nan_filled_outputs",
    "options_of",
    "reference_results",
    "run",
    "runnable",
    "skip_unsupported",
    "standard_attention",
    "unsupported_reason",
]

SQUARE_DIMS = tuple(d for d, dv in KERNEL_DIMS if d == dv)

LAYOUTS = (
    "bshd",  # rows padded with NaN, strides and offset multiples of 16 bytes
    "bhsd",  # SDPA's layout, seen through a transpose
    "sbhd",  # sequence first, batch second
    "packed",  # q, k and v are slices of one projection's output
    "odd_row",  # row stride not a multiple of 8 elements
    "odd_offset",  # first element not aligned to 16 bytes
    "expanded_heads",  # one K/V head broadcast over all: head stride 0
    "expanded_batch",  # one K/V sequence broadcast over the batch: batch stride 0
)
UNALIGNED_LAYOUTS = ("odd_row", "odd_offset")
ROW_BYTES = 16  # TMA addresses rows that start and end on boundaries of so many bytes

HANDFUL = 32
"""Of fewer numbers than this the largest error is a matter of luck, and the rule with it."""

SLOW_PRODUCTS = 1 << 20
"""Products of so many terms are slow in 16 bits on a CPU."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call with its gradients, whatever kernel computes it.

    `loss` says which outputs reach the loss: "out", "lse" or "both". `logit_gain` multiplies q.
    `alibi` and `bias` say along which dimensions the tensor is whole ("" for none): slopes "h" or
    "bh"; a bias "bhqk", or with a 1 for each dimension that it broadcasts, as in "1h1k".
    `bias_short` is by how many positions the bias of packed sequences misses the longest one. With
    `lengths_q` and `lengths_k` the sequences are packed, with `tail` unused rows after them; batch
    and sequence lengths then follow from these. A dtype of int8 is that of q and k, with v in FP8.
    `kv_dtype` is that of k and v where they have 8 bits and q more. The descales of 8-bit inputs
    are "scalar", "one" of shape (1,), by "head", or "fine": by blocks of rows or by channels.
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
    head_dim_v: int | None = None
    softcap: float = 0.0
    alibi: str = ""
    bias: str = ""
    bias_type: str = "input"  # or "float32" or "bool"
    bias_short: int = 0
    bias_gradient: bool = True
    sink: bool = False
    seqused_k: tuple[int, ...] | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    tail: int = 7
    q_descale: str = ""
    k_descale: str = ""
    v_descale: str = ""
    out_dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.lengths_q is not None:
            assert self.lengths_k is not None and len(self.lengths_q) == len(self.lengths_k)
            object.__setattr__(self, "batch", len(self.lengths_q))
            object.__setattr__(self, "seqlen_q", max(self.lengths_q, default=0))
            object.__setattr__(self, "seqlen_k", max(self.lengths_k, default=0))
        assert self.seqused_k is None or len(self.seqused_k) == self.batch

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
        if self.lengths_q is not None:
            words.append(f"packed{sum(self.lengths_q)}x{sum(self.lengths_k or ())}")
        if self.seqused_k is not None:
            words.append(f"seqused{sum(self.seqused_k)}")
        for field in (
            *("scale", "dropout_p", "layout", "loss", "logit_gain", "head_dim_v", "softcap"),
            *("alibi", "bias", "bias_type", "bias_short", "bias_gradient", "sink"),
            *("q_descale", "k_descale", "v_descale", "out_dtype", "kv_dtype"),
        ):
            value = getattr(self, field)
            if value != getattr(Problem, field):
                words.append(f"{field}_{value}")
        return "-".join(words)

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed: cu_seqlens_q and cu_seqlens_k are given."""
        return self.lengths_q is not None

    @property
    def dtype_k(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def dtype_v(self) -> torch.dtype:
        return self.kv_dtype or (FP8 if self.dtype in QK_8_BITS else self.dtype)

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def sequences(self) -> list[tuple[int, int]]:
        """The queries and the used keys of every sequence."""
        lengths_q = (self.seqlen_q,) * self.batch if self.lengths_q is None else self.lengths_q
        lengths_k = (self.seqlen_k,) * self.batch if self.lengths_k is None else self.lengths_k
        used = lengths_k if self.seqused_k is None else self.seqused_k
        keys = (min(max(n, 0), length) for n, length in zip(used, lengths_k, strict=True))
        return list(zip(lengths_q, keys, strict=True))

    def bias_shape(self) -> list[int]:
        sizes = (
            *(self.batch, self.heads_q),
            *(max(n - self.bias_short, 0) for n in (self.seqlen_q, self.seqlen_k)),
        )
        return [1 if c == "1" else n for c, n in zip(self.bias, sizes, strict=False)]

    def used_rows(self, side: str) -> torch.Tensor:
        """Which rows of q or k a sequence uses: bool, (batch, seqlen), packed (1, total)."""
        lengths = [pair["qk".index(side)] for pair in self.sequences()]
        if not self.packed:
            seqlen = self.seqlen_q if side == "q" else self.seqlen_k
            return torch.arange(seqlen)[None, :] < torch.tensor(lengths).view(-1, 1)
        rows = self.lengths_q if side == "q" else self.lengths_k
        used = torch.zeros(1, sum(rows) + self.tail, dtype=torch.bool)
        for length, stop, size in zip(lengths, itertools.accumulate(rows), rows, strict=True):
            used[:, stop - size : stop - size + length] = True
        return used

    def most_visible_keys(self) -> int:
        """The most keys that any one query sees."""
        return max(
            (self._most_visible_keys(*pair) for pair in self.sequences() if pair[0]), default=0
        )

    def _most_visible_keys(self, seqlen_q: int, seqlen_k: int) -> int:
        left, right = (side if side >= 0 else seqlen_q + seqlen_k for side in self.window)
        right = 0 if self.causal else right
        offset = seqlen_k - seqlen_q
        # The number of keys is concave in the query: it peaks at an end or where a bound sets in.
        queries = (0, seqlen_q - 1, left - offset, seqlen_k - 1 - right - offset)
        diagonals = (min(max(i, 0), seqlen_q - 1) + offset for i in queries)
        return max(min(d + right, seqlen_k - 1) - max(d - left, 0) + 1 for d in diagonals)

    def well_conditioned(self) -> Problem:
        """This problem made fit for the rule, which compares the largest errors of two methods.

        The largest of a handful of errors is a matter of luck, so small problems get more batches.
        And where a query sees only one key, dq and dk through out alone cancel to exactly 0 in
        standard attention, which leaves the rule no room for float32 rounding. Where that may be
        most queries (none sees more than three keys, and masks hide some), the loss uses lse too,
        and nothing is dropped, because delta = rowsum(dO * O) sees O rounded and dropout's factor
        enlarges what does not cancel. `test_one_visible_key` covers that case.

        A bias that is the same for all keys of a row shifts lse and leaves out alone: its gradient
        through out cancels in the same way. And where the gradient of the bias is a handful of
        numbers, which no further batch makes more, it is not asked for: test_bias.py holds those
        against the sum of the gradient of a whole bias.
        """
        queries, keys = (sum(pair[side] for pair in self.sequences()) for side in (0, 1))
        samples = min(queries * self.heads_q, keys * self.heads_k)
        samples *= min(self.head_dim, self.dim_v)
        bias_gradient = self.bias_gradient and (
            not self.bias or math.prod(self.bias_shape()) >= HANDFUL
        )
        if bias_gradient and self.bias.startswith("b") and self.bias_type != "bool":
            samples = min(samples, math.prod(self.bias_shape()))
        copies = min(100, -(-2000 // samples)) if samples else 1
        cancels = self.most_visible_keys() <= 3 or (
            self.bias.endswith("1") and self.bias_type != "bool"
        )
        return dataclasses.replace(
            self,
            batch=self.batch * copies,
            loss="both" if cancels and self.loss == "out" else self.loss,
            dropout_p=0.0 if cancels else self.dropout_p,
            bias_gradient=bias_gradient,
            **{
                field: getattr(self, field) and getattr(self, field) * copies
                for field in ("seqused_k", "lengths_q", "lengths_k")
            },
        )


@functools.lru_cache
def device_unsupported_reason(variant: str, device: str) -> str | None:
    """Why a variant runs nothing on a device: part of the message; None where it may run."""
    if device == "cpu":
        return None if variant in CPU_VARIANTS else "on a CPU"
    if variant == "fa3" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability[0] != 9:
            return "needs a Hopper GPU"
    return None


def unsupported_reason(variant: str, problem: Problem, device: str) -> str | None:
    """Why a variant does not run a problem on a device: part of the message; None where it runs."""
    p = problem
    if p.dtype_k in QK_8_BITS and variant not in FP8_VARIANTS:
        return "has no 8-bit inputs"
    if p.dtype_k in QK_8_BITS and device == "cpu":
        return None
    if reason := device_unsupported_reason(variant, device):
        return reason
    for name, about in ABOUT.items():
        value = getattr(p, name, None)
        if value and variant not in about.variants:
            return f"has no {name.removesuffix('_p')}"
        if value and value > about.most.get(variant, value):
            return f"has no {name} above {about.most[variant]}"
    if variant == "fa3" and (reason := fa3_bias_reason(p) or fa3_dropout_reason(p)):
        return reason
    unaligned = p.layout in UNALIGNED_LAYOUTS or p.head_dim % ROW_BYTES or p.dim_v % ROW_BYTES
    if p.dtype_k in QK_8_BITS and unaligned:  # fa3 copies rows of 16 bits
        return f"{ROW_BYTES}-byte boundaries"
    return None


def fa3_dropout_reason(problem: Problem) -> str | None:
    """Why fa3 does not have the problem's dropout; None where it has, or where there is none."""
    p = problem
    scores = p.softcap or p.alibi or (p.scale is not None and p.scale <= 0)
    most = p.dropout_p > (0.5 if p.dtype == torch.float16 else 31 / 32)
    runs = not p.dropout_p or (max(p.head_dim, p.dim_v) <= 128 and not scores and not most)
    return None if runs else "with these options"


def fa3_bias_reason(problem: Problem) -> str | None:
    """Why fa3 does not have the problem's bias; None where it has, or where there is none."""
    p = problem
    if not p.bias:
        return None
    if p.lengths_q is not None or p.seqused_k is not None:
        return "has no bias with sequences of different lengths"
    whole = {"b": p.batch, "h": p.heads_q, "q": p.seqlen_q, "k": p.seqlen_k}
    if 0 in (whole.get(dim, 1) for dim in p.bias):
        return "has no empty bias"
    widest = max(p.head_dim, p.dim_v)
    if p.bias_type == "float32" and widest > 64:
        return "has no float32 bias above head dimension 64"
    scores = p.softcap or p.alibi or (p.scale is not None and p.scale <= 0)
    return "with these options" if widest > 128 or scores or p.dropout_p else None


def backward_of(variant: str, problem: Problem) -> str:
    """The variant whose kernels compute the gradients, where `variant` runs the problem.

    For inputs of `make_inputs`: of these fa3 has no gradients where a tensor is empty.
    """
    p = problem
    empty = p.heads_q == 0 or not all(p.used_rows(side).numel() for side in "qk")
    return "fa2" if variant == "fa3" and empty else variant


def fastest(problem: Problem, device: str) -> str:
    """What "auto" stands for, but for few queries to many unaligned keys."""
    return next(v for v in reversed(VARIANTS) if unsupported_reason(v, problem, device) is None)


def skip_unsupported(variant: str, problem: Problem, device: str) -> None:
    """Skip a test whose problem the variant leaves to others."""
    if reason := unsupported_reason(variant, problem, device):
        pytest.skip(f"{variant} {reason}")


def runnable(variant: str, problem: Problem) -> Problem:
    """The problem without what a variant leaves to others."""
    if variant != "fa3":
        return problem
    others = {n: getattr(Problem, n) for n, about in ABOUT.items() if variant not in about.variants}
    if fa3_bias_reason(problem) is not None:
        others["bias"] = ""
    if fa3_dropout_reason(problem) is not None:
        others["dropout_p"] = 0.0
    return dataclasses.replace(problem, **others)


@dataclasses.dataclass
class Inputs:
    """q, k, v, sink and a bias that is not bool require a gradient; None is what is not given."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that require a gradient, by the name of the gradient."""
        names = ("q", "k", "v", "bias", "sink")
        tensors = {f"d{name}": getattr(self, name) for name in names}
        return {name: x for name, x in tensors.items() if x is not None and x.requires_grad}

    def options(self) -> dict[str, torch.Tensor]:
        """The optional tensors that are given, without cu_seqlens."""
        names = (
            *("rng_state", "alibi_slopes", "bias", "sink", "seqused_k"),
            *("q_descale", "k_descale", "v_descale"),
        )
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def upcast(self, dtype: torch.dtype) -> Inputs:
        """These inputs with every floating-point tensor in `dtype`, as new leaves."""
        new = {}
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if x is not None and x.is_floating_point():
                x = x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)
            new[field.name] = x
        return Inputs(**new)


def _poisoned(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    poison = 127 if dtype == torch.int8 else float("nan")  # which is True as a bool
    return torch.full(shape, poison, device=device, dtype=dtype)


def _view_in_poison(
    batch: int, seqlen: int, heads: int, dim: int, layout: str, device: str, dtype: torch.dtype
) -> torch.Tensor:
    """A (batch, seqlen, heads, dim) view of the given layout, every element around it NaN."""
    multiple = max(8, ROW_BYTES // dtype.itemsize)
    padded_dim = -(-dim // multiple) * multiple + multiple
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
    """The storage of q, k and v in the problem's layout, still NaN.

    Packed sequences are one batch here, their total the length.
    """
    p = problem
    (batch, rows_q), (_, rows_k) = (p.used_rows(side).shape for side in "qk")
    if p.layout == "packed":
        heads = p.heads_q + 2 * p.heads_k
        shape = (batch, max(rows_q, rows_k) + 1, heads, max(p.head_dim, p.dim_v))
        q, k, v = _poisoned(shape, device, p.dtype).split((p.heads_q, p.heads_k, p.heads_k), dim=2)
        return (
            q[:, :rows_q, :, : p.head_dim],
            k[:, :rows_k, :, : p.head_dim],
            v[:, :rows_k, :, : p.dim_v].view(p.dtype_v),
        )
    base = "bshd" if p.layout.startswith("expanded") else p.layout
    one = functools.partial(_view_in_poison, layout=base, device=device, dtype=p.dtype)
    batch_k = 1 if p.layout == "expanded_batch" else batch
    heads_k = 1 if p.layout == "expanded_heads" else p.heads_k
    return (
        one(batch, rows_q, p.heads_q, p.head_dim),
        one(batch_k, rows_k, heads_k, p.head_dim, dtype=p.dtype_k),
        one(batch_k, rows_k, heads_k, p.dim_v, dtype=p.dtype_v),
    )


def _row_in_poison(x: torch.Tensor, device: str) -> torch.Tensor:
    """x on the device, between elements that must not be read: NaN, for integers a huge one."""
    poison = float("nan") if x.is_floating_point() else 1 << 30
    padded = torch.nn.functional.pad(x, (1, 1), value=poison).to(device)
    return padded[..., 1:-1]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of lse, slopes and sink."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _make_bias(problem: Problem, device: str, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed, one in seven entries -inf if it depends on the key (bool: False).

    NaN wherever no sequence has both the query and the key.
    """
    p = problem
    dtype = {"input": p.dtype, "float32": statistics_dtype(p.dtype), "bool": torch.bool}[
        p.bias_type
    ]
    shape = p.bias_shape()
    stored = list(shape)
    for dim, layout in enumerate(("expanded_batch", "expanded_heads")):
        stored[dim] = min(shape[dim], 1) if p.layout == layout else shape[dim]
    base = "bshd" if p.layout.startswith("expanded") or p.layout == "packed" else p.layout
    if base == "bhsd":  # key-major: the last stride is not 1
        view = _view_in_poison(*stored[:2], *reversed(stored[2:]), "bshd", device, dtype).mT
    else:
        view = _view_in_poison(*stored, base, device, dtype)
    numbers = torch.randn(stored, generator=generator)
    hidden = torch.rand(stored, generator=generator) < (1 / 7 if "k" in p.bias else 0)
    if dtype == torch.bool:
        view.copy_(~hidden)
        return view.expand(shape)
    used = torch.zeros(stored, dtype=torch.bool)
    for index, (queries, keys) in enumerate(p.sequences()):
        b = index if stored[0] > 1 else 0
        used[b : b + 1, :, : queries if "q" in p.bias else 1, : keys if "k" in p.bias else 1] = True
    numbers = numbers.masked_fill(hidden, -torch.inf).masked_fill(~used, torch.nan)
    return view.copy_(numbers).expand(shape).detach().requires_grad_(p.bias_gradient)


def make_inputs(problem: Problem, device: str) -> Inputs:
    """Normally distributed inputs, the same numbers on every device and in every layout."""
    p = problem
    generator = torch.Generator().manual_seed(p.seed)
    used_q, used_k = p.used_rows("q"), p.used_rows("k")

    def fill(view: torch.Tensor, used: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(view.shape, generator=generator) * gain
        if view.shape[0] < used.shape[0]:  # stored once for the whole batch
            used = used.any(0, keepdim=True)
        if not view.dtype.is_floating_point:  # small, so that scores are not large
            return view.copy_((2 * numbers).round().masked_fill(~used[:, :, None, None], 127))
        numbers = numbers.masked_fill(~used[:, :, None, None], torch.nan)
        return view.copy_(numbers)

    q, k, v = _views(p, device)
    q, k, v = fill(q, used_q, p.logit_gain), fill(k, used_k), fill(v, used_k)
    k, v = (x.expand(*used_k.shape, p.heads_k, -1) for x in (k, v))
    base = "bshd" if p.layout.startswith("expanded") or p.layout == "packed" else p.layout
    batch, rows_q = used_q.shape
    dtype = p.dtype if p.kv_dtype else p.dtype_v
    dout = _view_in_poison(batch, rows_q, p.heads_q, p.dim_v, base, device, dtype)
    dout = fill(dout, used_q)
    dlse = torch.randn((batch, p.heads_q, rows_q), generator=generator)
    dlse = dlse.masked_fill(~used_q[:, None], torch.nan).to(device, statistics_dtype(p.dtype))
    if p.packed:
        q, k, v, dout, dlse = (x[0] for x in (q, k, v, dout, dlse))
    inputs = Inputs(
        *(x.detach().requires_grad_(p.dtype_k not in QK_8_BITS) for x in (q, k, v)),
        dout=dout if p.loss != "lse" else None,
        dlse=dlse if p.loss != "out" else None,
    )
    if p.dropout_p:
        inputs.rng_state = torch.tensor([0x1234_5678_9ABC + p.seed, 1 << 33 | 77], device=device)
    if p.alibi:  # so steep that distance matters, so flat that far keys count
        shape = (p.batch, p.heads_q) if p.alibi == "bh" else (p.heads_q,)
        slopes = torch.rand(shape, generator=generator, dtype=statistics_dtype(p.dtype))
        inputs.alibi_slopes = _row_in_poison(slopes * 0.2 + 0.01, device)
    if p.bias:
        inputs.bias = _make_bias(p, device, generator)
    if p.sink:  # about as heavy as a dozen keys
        sink = torch.randn(p.heads_q, generator=generator, dtype=statistics_dtype(p.dtype)) + 3
        inputs.sink = _row_in_poison(sink, device).detach().requires_grad_(not p.kv_dtype)
    if p.seqused_k is not None:
        # The CPU refuses what is beyond the keys. CUDA does not look, and must not read there.
        used = [keys for _, keys in p.sequences()] if device == "cpu" else p.seqused_k
        inputs.seqused_k = _row_in_poison(torch.tensor(used, dtype=torch.int32), device)
    if p.packed:
        inputs.cu_seqlens_q, inputs.cu_seqlens_k = (
            _row_in_poison(torch.tensor((0, *itertools.accumulate(x)), dtype=torch.int32), device)
            for x in (p.lengths_q, p.lengths_k)
        )
    for name in ("q_descale", "k_descale", "v_descale"):
        if kind := getattr(p, name):
            setattr(inputs, name, _make_descale(p, name, kind, device, generator))
    return inputs


# Tests run a problem again and again, and its variants in turn. Only for those that do not write.
own_inputs = functools.lru_cache(maxsize=1)(make_inputs)


def _make_descale(
    problem: Problem, name: str, kind: str, device: str, generator: torch.Generator
) -> torch.Tensor:
    """From a half to two, with odd strides; NaN for the blocks that a sequence does not have."""
    p = problem
    if kind in ("scalar", "one"):
        return _row_in_poison(torch.rand(1, generator=generator) * 1.5 + 0.5, device)[
            0 if kind == "scalar" else slice(None)
        ]
    shape = (p.batch, p.heads_k)
    if kind == "head":
        return _row_in_poison(torch.rand(shape, generator=generator) * 1.5 + 0.5, device)
    assert kind == "fine"
    if name == "v_descale":
        numbers = torch.rand((*shape, p.dim_v), generator=generator) * 1.5 + 0.5
        return _row_in_poison(numbers, device)
    heads, longest = (p.heads_q, p.seqlen_q) if name == "q_descale" else (p.heads_k, p.seqlen_k)
    blocks = -(-longest // DESCALE_ROWS) + p.packed
    numbers = torch.rand((blocks, p.batch, heads), generator=generator) * 1.5 + 0.5
    if p.packed:
        lengths = torch.tensor(p.lengths_q if name == "q_descale" else p.lengths_k)
        unused = torch.arange(blocks)[:, None] * DESCALE_ROWS >= lengths
        numbers = numbers.masked_fill(unused[:, :, None], torch.nan)
    return _row_in_poison(numbers, device).permute(1, 2, 0)


def options_of(problem: Problem) -> dict[str, object]:
    """The keyword options of `flash_ext.attention` that are not tensors."""
    return {
        "scale": problem.scale,
        "causal": problem.causal,
        "window": problem.window,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
    } | ({} if problem.out_dtype is None else {"out_dtype": problem.out_dtype})


def attend(
    problem: Problem, inputs: Inputs, module: ModuleType = flash_ext, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by `module`, flash_ext (with return_lse=True) or flash_ext.reference."""
    options = options_of(problem) | inputs.options() | more
    if not problem.packed:
        return module.attention(inputs.q, inputs.k, inputs.v, **options)
    cu_seqlens = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return module.attention_varlen(inputs.q, inputs.k, inputs.v, *cu_seqlens, **options)


@contextlib.contextmanager
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


def _results(
    out: torch.Tensor, lse: torch.Tensor, inputs: Inputs, **more: object
) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of <out, dout> + <lse, dlse>; those of unused inputs are 0."""
    pairs = [(out, inputs.dout), (lse, inputs.dlse)]
    outputs, grads = zip(*((x, g) for x, g in pairs if g is not None), strict=True)
    leaves = inputs.leaves()
    grads = torch.autograd.grad(outputs, tuple(leaves.values()), grads, **more)
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(leaves, grads, strict=True))


def run(
    problem: Problem,
    variant: str,
    device: str,
    *,
    deterministic: bool = False,
    inputs: Inputs | None = None,
) -> dict[str, torch.Tensor]:
    """out, lse and every gradient of the problem by one variant, through the public function."""
    inputs = inputs or own_inputs(problem, device)
    with nan_filled_outputs():
        out, lse = attend(
            problem, inputs, deterministic=deterministic, variant=variant, return_lse=True
        )
        return _results(out, lse, inputs)


class _ProductsOnTheCPU(TorchDispatchMode):
    """16-bit matrix products as the CPU has them, sums in float32 rounded once, by a fast GEMM."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.bmm.default:
            return func(*args, **(kwargs or {}))
        return torch.bmm(*(x.float() for x in args)).to(args[0].dtype)


def standard_attention(
    problem: Problem, inputs: Inputs, dtype: torch.dtype, *, backward: bool = True
) -> dict[str, torch.Tensor]:
    """Standard attention and its gradients: everything in float64, or q, k, v in their own type."""
    if dtype != inputs.q.dtype:
        inputs = inputs.upcast(dtype)
    products = problem.heads_q * problem.head_dim * sum(map(math.prod, problem.sequences()))
    faster = dtype.itemsize == 2 and inputs.q.device.type == "cpu" and products > SLOW_PRODUCTS
    with (
        _ProductsOnTheCPU() if faster else contextlib.nullcontext(),
        torch.set_grad_enabled(backward),
    ):
        out, lse = attend(problem, inputs, flash_ext.reference)
        if not backward:
            return {"out": out, "lse": lse}
        return _results(out, lse, inputs, allow_unused=True, materialize_grads=True)


class Expected(NamedTuple):
    """What results are compared with, each by name."""

    ref: dict[str, torch.Tensor]
    """Standard attention in float64."""
    pt: dict[str, torch.Tensor]
    """Standard attention in the input type."""
    size: dict[str, torch.Tensor] = {}
    """`sizes`, of the results whose rows are judged one by one."""


def _error_of_p(dtype: torch.dtype) -> float:
    """P = exp(S - lse) is as wrong as S - lse, whose rounding error grows with it."""
    return 16 * torch.finfo(statistics_dtype(dtype)).eps


def sizes(
    problem: Problem, inputs: Inputs, ref: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """How large the results would be if nothing cancelled: rounding errors are relative to it.

    P |V| for out, and P^T |dO| for dV. In dS = P (dP - D) an error of D = rowsum(dO * O) meets each
    P, and the sum of P K is the gradient of lse: so dQ, dK and dbias have that much in addition.
    O, dS and P below the type's smallest normal number are rounded to a grid, half a step each, as
    if they had that size: in D, out, dQ, dK and dV these errors meet dO and rows of V, K, Q and dO.
    """
    inputs = inputs.upcast(torch.float64)
    leaves = inputs.leaves()
    leaves["dv"] = inputs.v = inputs.v.detach().abs().requires_grad_()
    out, lse = attend(problem, inputs, flash_ext.reference)
    found = {"out": out.detach()}
    names = [name for name in ("dq", "dk", "dbias") if name in leaves]
    smallest = torch.finfo(problem.dtype).tiny
    if inputs.dout is None:
        dout = None
        found |= {name: ref[name].abs() for name in names}
    else:
        options = {"allow_unused": True, "materialize_grads": True}
        dout = inputs.dout.abs()
        (found["dv"],) = torch.autograd.grad(out, leaves["dv"], dout, retain_graph=True, **options)
        rounded = ref["out"].abs().clamp_min(smallest)
        delta = (dout * rounded).norm(dim=-1).mT  # of the errors of this many products
        shares = torch.autograd.grad(lse, [leaves[name] for name in names], delta, **options)
        found |= {n: ref[n].abs() + x.abs() for n, x in zip(names, shares, strict=True)}
    if inputs.q.numel() and inputs.k.numel():
        tiny = smallest / (1 - problem.dropout_p)  # of dS, which has a part of dropout's factor
        tiny *= problem.scale or inputs.q.shape[-1] ** -0.5
        group = inputs.q.shape[-2] // inputs.k.shape[-2]

        def of_all_rows(x: torch.Tensor) -> torch.Tensor:  # those that are not in use may be NaN
            return x.detach().nan_to_num(0.0).norm(dim=-3, keepdim=True)

        def of_groups(x: torch.Tensor) -> torch.Tensor:
            return of_all_rows(x).unflatten(-2, (-1, group)).norm(dim=-2)

        # P has dropout's factor when it is rounded. A row's largest P, 1, makes this little.
        found["out"] = found["out"] + smallest * of_all_rows(inputs.v).repeat_interleave(
            group, dim=-2
        )
        found["dq"] = found["dq"] + tiny * of_all_rows(inputs.k).repeat_interleave(group, dim=-2)
        found["dk"] = found["dk"] + tiny * of_groups(inputs.q)
        if dout is not None:
            found["dv"] = found["dv"] + smallest * of_groups(dout)
    if problem.softcap:
        # Where 1 - tanh^2 is nearly 0 it is as wrong as tanh, which kernels find from P and lse.
        error = _error_of_p(problem.dtype)
        ratio = error / (torch.finfo(problem.dtype).eps + error)
        for name in names:
            found[name] = found[name] + ratio * _largest(found[name])
    return found


def expected_results(problem: Problem, inputs: Inputs) -> Expected:
    """What the problem gives with these inputs."""
    ref, pt = (standard_attention(problem, inputs, x) for x in (torch.float64, problem.dtype))
    return Expected(ref, pt, sizes(problem, inputs, ref))


def expected_forward(problem: Problem, inputs: Inputs) -> Expected:
    """Of `expected_results` only out and lse, at a fraction of the time."""
    ref, pt = (
        standard_attention(problem, inputs, x, backward=False)
        for x in (torch.float64, problem.dtype)
    )
    magnitudes = dataclasses.replace(inputs, v=inputs.v.detach().abs())
    size = standard_attention(problem, magnitudes, torch.float64, backward=False)
    return Expected(ref, pt, {"out": size["out"]})


@functools.lru_cache(maxsize=2)
def reference_results(problem: Problem, device: str) -> Expected:
    """`expected_results` with its own inputs; cached because the variants are tested in turn."""
    return expected_results(problem, own_inputs(problem, device))


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _apart(x: torch.Tensor, ref: torch.Tensor) -> float:
    """1 - 2<x, ref> / (<x, x> + <ref, ref>): half the squared distance, for a small one."""
    squares = float((x * x).sum() + (ref * ref).sum())
    return float(((x - ref) ** 2).sum()) / squares if squares > 0 else 0.0


def _assert_rows_accurate(
    name: str,
    x: torch.Tensor,
    ref: torch.Tensor,
    pt: torch.Tensor,
    size: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """The rule for each row, and for the direction of all of them. In float64."""
    if x.numel() == 0:
        return
    eps = torch.finfo(dtype).eps + _error_of_p(dtype)
    # What numbers near 0 are rounded to: the type's smallest, one of fp16's grid; and exponentials
    # below 2^-126 to 0, whose products with dP and q are larger, and summed.
    limits = torch.finfo(dtype)
    tiny = max(limits.tiny * limits.eps, 2.0**-100)
    # The sizes of out and dv bound each error; those of the others, only all of some together.
    if name in ("out", "dv") or x.shape[-1] >= HANDFUL:
        error, plain, allowed = (t.abs().amax(-1) for t in (x - ref, pt - ref, size))
        excess = error - (2 * plain + 2 * eps * allowed + tiny)
        worst = int(excess.argmax())
        assert excess.flatten()[worst] <= 0, (
            f"{name}: row {worst} of {excess.numel()} is off by {error.flatten()[worst]:.3e},"
            f" more than its bound by {excess.flatten()[worst]:.3e}"
        )
    if x.numel() >= HANDFUL and _largest(ref) > 0:
        cancelled = 0.0 if name in ("out", "dv") else float((size - ref.abs()).norm() / ref.norm())
        bound = 2 * _apart(pt, ref) + eps**2 * (1 / 4 + cancelled**2 / 8)
        assert _apart(x, ref) <= bound, f"{name}: {_apart(x, ref):.3e} apart, more than {bound:.3e}"


class Inaccurate(AssertionError):
    """A largest error above its bound, which is that of standard attention's errors."""

    def __init__(self, name: str, error: float, bound: float) -> None:
        super().__init__(f"{name}: max error {error:.3e} is above the bound {bound:.3e}")
        self.factor = error / bound if bound else float("inf")


def assert_accurate(
    actual: dict[str, torch.Tensor], expected: Expected, dtype: torch.dtype
) -> None:
    """Apply the rule of this file to every result; never a NaN, and the same -inf in lse."""
    for name, x in actual.items():
        ref, pt = expected.ref[name], expected.pt[name].double()
        assert x.shape == ref.shape, f"{name}: shape {x.shape}, expected {ref.shape}"
        given = expected.pt[name].dtype
        assert x.dtype == given, f"{name}: {x.dtype}, expected {given}"
        x = x.double()
        assert not x.isnan().any(), f"{name}: {int(x.isnan().sum())} of {x.numel()} are NaN"
        if name == "lse":
            masked = ref == -torch.inf
            assert torch.equal(x == -torch.inf, masked), "lse is -inf in the wrong rows"
            x, ref, pt = (t.masked_fill(masked, 0.0) for t in (x, ref, pt))
        rounded = ref.to(dtype)
        rounding = _largest((rounded + 0.3 - 0.3).double() - rounded.double())
        bound = 2 * _largest(pt - ref) + 2 * rounding
        error = _largest(x - ref)
        if not error <= bound:
            raise Inaccurate(name, error, bound)
        if name == "lse":  # lse is a float32 result, whatever the input type
            excess = (x - ref).abs() - 1e-4 * (1 + ref.abs()) - 4e-6 * _largest(ref)
            assert (excess <= 0).all(), f"lse: not float32, by {_largest(excess.relu()):.3e}"
        if name in expected.size:
            _assert_rows_accurate(name, x, ref, pt, expected.size[name], dtype)


def check(
    problem: Problem,
    variant: str,
    device: str,
    *,
    deterministic: bool = False,
    inputs: Inputs | None = None,
) -> dict[str, torch.Tensor]:
    """Run one problem on one variant and hold every result against the reference; returns them.

    `inputs` replaces those that `make_inputs` makes.
    """
    actual = run(problem, variant, device, deterministic=deterministic, inputs=inputs)
    if inputs is None:
        expected = reference_results(problem, device)
    else:
        expected = expected_results(problem, inputs)
    judged = dict(actual)
    if problem.sink:
        assert_sink_gradient(actual, inputs or own_inputs(problem, device))
        if problem.heads_q < HANDFUL:
            del judged["dsink"]
    assert_accurate(judged, expected, problem.dtype)
    if problem.loss == "lse":
        assert not actual["dv"].any(), "lse does not depend on v: dv must be exactly 0"
    assert_unused_rows_are_zero(problem, actual)
    return actual


def assert_sink_gradient(actual: dict[str, torch.Tensor], inputs: Inputs) -> None:
    """dsink is a sum over rows of the kernel's own out and lse, exact up to float32.

    dsink = -sum exp(sink - lse) delta with delta = rowsum(dO * O) - dlse. Unlike the rule this
    judges a single number without luck; the rule judges it where there are heads enough.
    """
    lse, out = actual["lse"].double(), actual["out"].double()
    weight = torch.exp(inputs.sink.detach().double()[:, None] - lse)
    weight = weight.masked_fill(lse == -torch.inf, 0)
    products = torch.zeros_like(out) if inputs.dout is None else inputs.dout.double() * out
    dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.double()
    rows = lse != -torch.inf  # of the others dout and dlse may be anything

    def of_heads(per_row: torch.Tensor) -> torch.Tensor:
        per_row = (weight * per_row).masked_fill(~rows, 0).sum(-1)
        return per_row.sum(0) if per_row.dim() == 2 else per_row

    expected = -of_heads(products.sum(-1).mT - dlse)
    size = of_heads(products.abs().sum(-1).mT + dlse.abs())
    error = (actual["dsink"] - expected).abs()
    assert (error <= 2e-5 * size + 1e-6).all(), f"dsink: {error} off, of sums of {size}"


def assert_unused_rows_are_zero(problem: Problem, actual: dict[str, torch.Tensor]) -> None:
    """Exactly 0, not merely small, in the rows that no sequence uses."""
    for side, names in (("q", ("out", "dq")), ("k", ("dk", "dv"))):
        unused = ~problem.used_rows(side)
        for name in names:
            x = actual[name].unsqueeze(0) if problem.packed else actual[name]
            assert not x[unused.to(x.device)].any(), f"{name}: rows without a sequence are not 0"


def assert_is_sink(lse: torch.Tensor, sink: torch.Tensor) -> None:
    """The lse (…, Hq, rows) of rows that see no key: the sink, up to a change of the base."""
    torch.testing.assert_close(lse, sink[:, None].expand_as(lse), rtol=1e-6, atol=1e-6)


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
