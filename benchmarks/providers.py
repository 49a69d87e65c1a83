"""What compare.py measures: flash_ext's variants and their peers, with one signature."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import common
import torch
from common import SHAPES, Json, say
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_ext
import flash_ext.reference

# q, k, v, causal -> out. Those that can hide all but the last n keys take n as `window` as well.
Attend = Callable[..., Tensor]
T = TypeVar("T")
LABELS: dict[str, str] = SHAPES["names"]["labels"]
DISTRIBUTIONS: dict[str, str] = SHAPES["names"]["distributions"]
# Relative errors beyond which a result is wrong: of the whole, and of the worst block of rows.
LIMITS = 2e-2, 1e-1


class Refused(Exception):
    """A variant of flash_ext says that it does not take a call. That is no failure."""


class Wrong(Exception):
    """A result is wrong. Its call is not timed."""


def attempt(function: Callable[[], T]) -> tuple[T | None, Json]:
    """What a function returns, or None and why: a failure in one place must not end a run."""
    try:
        return function(), {}
    except Refused as refusal:
        return None, {"skipped": str(refusal), "refused": True}
    except Wrong as wrong:
        say(f"!!! {wrong} !!!")
        return None, {"skipped": str(wrong), "wrong": True}
    except Exception as error:
        return None, {"skipped": common.first_line(error)}


def prepared(makes: dict[str, Callable[[], T]]) -> tuple[dict[str, T], Json]:
    """What each of these returns; and for those that fail, as of `attempt`, why."""
    found: dict[str, T] = {}
    reasons: Json = {}
    for name, make in makes.items():
        made, reasons[name] = attempt(make)
        if made is not None:
            found[name] = made
        elif torch.cuda.is_available():
            torch.cuda.empty_cache()  # a graph that did not fit must not stay
    return found, {name: reason for name, reason in reasons.items() if reason}


@dataclass(frozen=True)
class Provider:
    """One implementation of attention. ``attend`` takes and returns its own layout, as views of the
    same (B, S, H, D) memory, so no provider needs a copy."""

    name: str
    attend: Attend
    heads_first: bool = False  # takes (B, H, S, D)
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # of every call
    windows: bool = False  # does ``attend`` take a window?
    limits: tuple[float, float] = LIMITS
    fp8: bool = False  # is it asked for 8-bit inputs alone? (fp8_providers.py)

    @property
    def ours(self) -> bool:
        return self.name in flash_ext.VARIANTS

    def view(self, x: Tensor) -> Tensor:
        """(B, S, H, D) to the provider's layout, and back."""
        return x.transpose(1, 2) if self.heads_first else x


def variant(name: str) -> Provider:
    """A variant of flash_ext; of "auto" the call is that of a user who names none."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int = 0) -> Tensor:
        if not window:  # the call of a user who has none: its host time is measured
            return flash_ext.attention(q, k, v, causal=causal, variant=name)
        return flash_ext.attention(q, k, v, window=(window - 1, 0 if causal else -1), variant=name)

    return Provider(name, attend, windows=True)


def sdpa(name: str, backend: SDPBackend) -> Provider:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout_p: float = 0.0) -> Tensor:
        if causal and q.shape[2] != k.shape[2]:
            raise ValueError("is_causal aligns the first query with the first key, not the last")
        options: Json = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)

    return Provider(name, attend, True, functools.partial(sdpa_kernel, [backend]))


@functools.lru_cache(maxsize=1)
def causal_mask(seqlen_q: int, seqlen_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(Sq, Sk): -inf where key j is hidden from query i, otherwise 0; made in untimed calls."""
    hidden = torch.full((seqlen_q, seqlen_k), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(1 + seqlen_k - seqlen_q)


def standard() -> Provider:
    """Standard attention in three passes over HBM, in the inputs' type: S = QK', softmax, PV.
    Leaner than flash_ext.reference, so that no ratio is flattered: the scale goes into Q, and the
    mask is added in place, which the backward pass has nothing to do for."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        group = q.shape[2] // k.shape[2]
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        scores = (q * q.shape[-1] ** -0.5).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        if causal:
            scores += causal_mask(q.shape[1], k.shape[1], q.dtype, q.device)
        return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)

    return Provider("standard", attend)


def flash_attn(*modules: str) -> Callable[..., Any]:
    """flash_attn_func of the first of these modules. Raises ImportError without any."""
    module = next(filter(importlib.util.find_spec, modules), modules[0])
    found: Callable[..., Any] = importlib.import_module(module).flash_attn_func
    return found


def package(name: str, *modules: str) -> Provider:
    """A flash-attn package. Raises ImportError where it is not installed."""
    function = flash_attn(*modules)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int = 0, **options: Any
    ) -> Tensor:
        if window:
            options["window_size"] = (window - 1, 0 if causal else -1)
        result = function(q, k, v, causal=causal, **options)
        return result[0] if isinstance(result, tuple) else result

    return Provider(name, attend, windows=True)


FLASH_ATTN_3 = "flash_attn_interface", "fa3_fwd_interface"  # its own, or a build of the forward
VARIANTS: dict[str, Callable[[], Provider]] = {
    name: (lambda name=name: variant(name)) for name in flash_ext.VARIANTS
}
PEERS: dict[str, Callable[[], Provider]] = {
    "flash": lambda: sdpa("flash", SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda: sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    "efficient": lambda: sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION),
    "standard": standard,
    "flash_attn_2": lambda: package("flash_attn_2", "flash_attn"),
    "flash_attn_3": lambda: package("flash_attn_3", *FLASH_ATTN_3),
    "flash_attn_4": lambda: package("flash_attn_4", "flash_attn.cute"),
}
# What fa3 is compared with: the fastest of these, cell by cell, as a provider of this name.
BEST, BEST_OF = "best_peer", ("cudnn", "flash_attn_4")


def command_line(description: str | None, peers: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of what every benchmark of providers takes: --device, --variants, --peers."""
    parser = common.parser(description, device=True)
    add = parser.add_argument
    add("--variants", nargs="*", choices=list(VARIANTS), help="default: all that run")
    add("--peers", nargs="*", default=list(peers), choices=list(PEERS))
    return parser


def refusal(
    variant: str, q: Tensor, k: Tensor, v: Tensor, gradients: bool = False, **options: Any
) -> str | None:
    """Why a variant does not take a call, or nobody its gradients; None where all is well."""
    found = flash_ext.explain(q, k, v, variant=variant, **options)
    reason = found.reasons[variant]
    return found.why_backward if reason is None and gradients and not found.backward else reason


def running(device: torch.device, d: int = 64, gradients: bool = False) -> list[str]:
    """The variants that run on a device, with this head dim."""
    q = torch.zeros(1, 8, 1, d, dtype=torch.bfloat16, device=device)
    return [name for name in VARIANTS if refusal(name, q, q, q, gradients) is None]


def versions(providers: Iterable[Provider]) -> dict[str, str]:
    """The versions of the packages among them that are installed under their usual names."""
    found = {}
    for p in providers:
        with suppress(importlib.metadata.PackageNotFoundError):
            if p.name in DISTRIBUTIONS:
                found[p.name] = importlib.metadata.version(DISTRIBUTIONS[p.name])
    return found


def collect(variants: list[str], peers: list[str]) -> tuple[list[Provider], dict[str, str]]:
    """The providers asked for, and for each package that is not importable the reason."""
    found, missing = [VARIANTS[name]() for name in variants], {}
    for name in peers:
        try:
            found.append(PEERS[name]())
        except Exception as error:  # a broken package fails in its own ways on import
            missing[name] = common.first_line(error)
    return found, missing


class Workload:
    """Fresh random inputs of one shape, and the exact results to hold every provider against."""

    CHUNK_BYTES = 1 << 30  # of one float32 score matrix, while computing the exact results
    BLOCK = 64  # rows per block of the block-wise error
    MATRIX_BYTES, LAST_ROWS = 8 << 30, 128  # beyond so many, only the last rows of out are checked

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device,
        seqlen_q: int = 0, kv_heads: int = 0, d_v: int = 0, window: int = 0
    ) -> None:  # fmt: skip
        """``shape`` is (B, Sk, Hq, D). ``seqlen_q``, ``kv_heads`` and ``d_v``, the head dim of v,
        are equal to those where 0. ``window`` is how many keys a query sees; 0: all."""
        batch, seqlen, heads, width = shape
        queries, keys = (batch, seqlen_q or seqlen, heads), (batch, seqlen, kv_heads or heads)
        sizes = (queries, width), (keys, width), (keys, d_v or width), (queries, d_v or width)
        self.q, self.k, self.v, self.dout = (
            torch.randn((*size, d), dtype=dtype, device=device) for size, d in sizes
        )
        self.window = window

    def asked(self, providers: Iterable[Provider]) -> list[Provider]:
        """Those that compute this."""
        return [p for p in providers if not p.fp8]

    def wanted(self, provider: Provider, exact: list[Tensor]) -> list[Tensor]:
        """What a provider's results must be where ``exact`` gave these."""
        return exact

    def forward(self, provider: Provider, causal: bool) -> Callable[[], Tensor]:
        """The forward call to be timed; it returns out as (B, S, H, D)."""
        attend = self.bare(provider, causal)

        def call() -> Tensor:
            with torch.no_grad(), provider.around():
                return provider.view(attend())

        return call

    def bare(self, provider: Provider, causal: bool) -> Callable[[], Tensor]:
        """Only the forward call, without what must be around it."""
        q, k, v = (provider.view(x) for x in (self.q, self.k, self.v))
        window = self.options(provider, causal)
        return lambda: provider.attend(q, k, v, causal, **window)

    def options(self, provider: Provider, causal: bool, gradients: bool = False) -> dict[str, int]:
        """The window, for a provider that takes one. Raises ValueError for another, and `Refused`
        for a variant of flash_ext that does not take the call."""
        if self.window and not provider.windows:
            raise ValueError(f"{LABELS[provider.name]} has no window")
        if provider.ours:
            window = (self.window - 1 if self.window else -1, 0 if causal else -1)
            inputs = self.q, self.k, self.v
            if reason := refusal(provider.name, *inputs, gradients, window=window):
                raise Refused(reason)
        return {"window": self.window} if self.window else {}

    def graph(
        self, provider: Provider, causal: bool
    ) -> tuple[list[Tensor], Callable[[], Tensor], Tensor]:
        """Leaves, the forward call on them, and dout, in the provider's layout."""
        *leaves, dout = (provider.view(x) for x in (self.q, self.k, self.v, self.dout))
        leaves = [x.detach().requires_grad_() for x in leaves]
        window = self.options(provider, causal, gradients=True)
        return leaves, lambda: provider.attend(*leaves, causal, **window), dout

    def backward(self, provider: Provider, causal: bool) -> Callable[[], tuple[Tensor, ...]]:
        """The backward call to be timed, on a graph built here; it returns dq, dk, dv."""
        leaves, attend, dout = self.graph(provider, causal)
        with provider.around():
            out = attend()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def step(self, provider: Provider, causal: bool) -> Callable[[], tuple[Tensor, ...]]:
        """Forward and backward, without what must be around them; it returns dq, dk, dv."""
        leaves, attend, dout = self.graph(provider, causal)
        return lambda: torch.autograd.grad(attend(), leaves, dout)

    def exact(self, causal: bool, gradients: bool) -> list[Tensor]:
        """out, or out, dq, dk, dv, of standard attention in float32, each (B, S, H, D).

        Without gradients, and where one head's scores would take more than MATRIX_BYTES, only the
        last LAST_ROWS rows of out."""
        (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = self.q.shape, self.k.shape
        q, dout = self.q, self.dout
        if not gradients and 4 * seqlen_q * seqlen_k > self.MATRIX_BYTES:
            q, dout = q[:, -self.LAST_ROWS :], dout[:, -self.LAST_ROWS :]
        k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (self.k, self.v))
        # One head per batch entry, so that a chunk may hold any number of heads.
        flat = [x.transpose(1, 2).flatten(0, 1).unsqueeze(2) for x in (q, k, v, dout)]
        step = max(1, self.CHUNK_BYTES // (4 * q.shape[1] * seqlen_k))
        window = (self.window - 1, 0 if causal else -1) if self.window else (-1, -1)
        parts = []
        for chunk in zip(*(x.split(step) for x in flat), strict=True):
            *leaves, gradient = (x.float() for x in chunk)
            leaves = [x.requires_grad_(gradients) for x in leaves]
            out = flash_ext.reference.attention(*leaves, causal=causal, window=window)[0]
            grads = torch.autograd.grad(out, leaves, gradient) if gradients else ()
            parts.append([out.detach(), *grads])
        out, *grads = (
            torch.cat(x).squeeze(2).unflatten(0, (batch, heads)).transpose(1, 2)
            for x in zip(*parts, strict=True)
        )
        # Query heads that share a key head add up to its gradients.
        return [out, *grads[:1], *(x.unflatten(2, (kv_heads, -1)).sum(3) for x in grads[1:])]


def check(pairs: Iterable[tuple[Tensor, Tensor]], limits: tuple[float, float] = LIMITS) -> float:
    """The largest relative error of a call's results, each beside what it should be; raises `Wrong`
    where one is beyond the limits."""
    errors = [relative_error(got, want) for got, want in pairs]
    whole, block = map(max, zip(*errors, strict=True))
    if not (whole <= limits[0] and block <= limits[1]):
        raise Wrong(f"WRONG RESULT: relative error {whole:.2g}, worst block {block:.2g}")
    return float(f"{whole:.4g}")


def relative_error(got: Tensor, want: Tensor, block: int = Workload.BLOCK) -> tuple[float, float]:
    """Frobenius error of (B, S, H, D) tensors relative to ``want``: of the whole, and of the
    worst block of 64 rows of one head, where a single wrong tile shows. NaN counts as infinite."""
    pad = -want.shape[1] % block

    def block_squares(x: Tensor) -> Tensor:
        rows = x.float().square().sum(-1)  # (B, S, H)
        return torch.nn.functional.pad(rows, (0, 0, 0, pad)).unflatten(1, (-1, block)).sum(2)

    wrong, size = block_squares(got.float() - want), block_squares(want)
    # A block that is all zeros by rights (dq of a first row) is measured against the average.
    floor = size.mean() * 1e-2 + 1e-30
    whole = (wrong.sum() / (size.sum() + 1e-30)).sqrt()
    worst = (wrong / size.clamp_min(floor)).max().sqrt()
    errors = torch.stack([whole, worst]).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(errors[0]), float(errors[1])
