"""What every implementation is asked to compute, and what it should find."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import reference

Json = dict[str, Any]

CPU_FLOPS = 1e8  # of all forward passes of a run; more take minutes on a CPU
CHECKED_SCORES = 1 << 29  # the largest float32 score matrix of a head, 2 GiB, that is checked


@dataclass(frozen=True)
class Shape:
    """What every implementation is asked to compute."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool

    def __str__(self) -> str:
        heads = f"{self.heads} heads"
        if self.kv_heads != self.heads:
            heads += f" on {self.kv_heads} of keys"
        dims = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        length = f"{self.queries}"
        if self.keys != self.queries:
            length += f" queries and {self.keys} keys"
        mask = "causal" if self.causal else "without a mask"
        return f"{self.batch} x {length}, {heads}, head dim {dims}, {mask}"

    def sides(self, options: Json) -> tuple[int, int]:
        """How many keys a query sees before and after its own; -1: all."""
        left, right = options.get("window", (-1, -1))
        return left, 0 if self.causal else right

    def pairs(self, options: Json) -> float:
        """The visible pairs of a query and a key in a head, half of a triangle's diagonal."""
        left, right = self.sides(options)
        if (left, right) == (-1, 0):
            seeing = min(self.queries, self.keys)
            return seeing * (self.keys - seeing / 2)
        own = torch.arange(self.queries, device="cpu") + self.keys - self.queries
        first = (own - left).clamp(min=0) if left >= 0 else torch.zeros_like(own)
        last = own + right if right >= 0 else torch.full_like(own, self.keys)
        return float((last.clamp(max=self.keys - 1) - first + 1).clamp(min=0).sum())

    def flops(self, backward: bool, options: Json) -> float:
        """Floating-point operations of the two matmuls forward, or of the five backward."""
        columns = self.head_dim + self.head_dim_v
        if backward:  # dP and dV have V's head dim, the others Q's and K's
            columns = 3 * self.head_dim + 2 * self.head_dim_v
        return 2.0 * self.batch * self.heads * columns * self.pairs(options)


def for_cpu(shapes: list[Shape]) -> list[Shape]:
    """Shapes with at most CPU_FLOPS in all: fewer sequences, fewer heads, then shorter ones."""
    while sum(x.flops(backward=False, options={}) for x in shapes) > CPU_FLOPS:
        first = shapes[0]
        if first.batch > 1:
            shapes = [replace(x, batch=x.batch // 2) for x in shapes]
        elif first.kv_heads > 1:
            kv_heads = first.kv_heads // 2
            heads = first.heads // first.kv_heads * kv_heads
            shapes = [replace(x, heads=heads, kv_heads=kv_heads) for x in shapes]
        else:
            shapes = [replace(x, queries=-(-x.queries // 2), keys=-(-x.keys // 2)) for x in shapes]
    return list(dict.fromkeys(shapes))


class Inputs:
    """Random q, k, v and dout of a shape, and the results that they should give."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        def tensor(length: int, heads: int, dim: int) -> Tensor:
            return torch.randn(shape.batch, length, heads, dim, dtype=dtype, device=device)

        self.shape = shape
        self.q = tensor(shape.queries, shape.heads, shape.head_dim)
        self.k = tensor(shape.keys, shape.kv_heads, shape.head_dim)
        self.v = tensor(shape.keys, shape.kv_heads, shape.head_dim_v)
        self.dout = tensor(shape.queries, shape.heads, shape.head_dim_v)

    def checked(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The last key head of the last sequence: of out, or of dq, dk and dv."""
        group = self.shape.heads // self.shape.kv_heads
        of_queries, *of_keys = results
        return [of_queries[-1:, :, -group:], *(x[-1:, :, -1:] for x in of_keys)]

    def exact(self, options: Json, backward: bool) -> list[Tensor] | None:
        """What `checked` should give, from float32, or None if that needs too much memory.

        Of long sequences only the last rows of out.
        """
        rows = self.shape.queries
        if rows * self.shape.keys > CHECKED_SCORES:
            if backward:
                return None
            rows = max(1, CHECKED_SCORES // self.shape.keys)
        group = self.shape.heads // self.shape.kv_heads
        found: list[list[Tensor]] = []
        for head in range(self.shape.heads - group, self.shape.heads):
            q, k, v = self.q[-1:, -rows:, head, None], self.k[-1:, :, -1:], self.v[-1:, :, -1:]
            leaves = [x.float().requires_grad_(backward) for x in (q, k, v)]
            own = of_head(options, head, rows)
            out, _ = reference.attention(*leaves, causal=self.shape.causal, **own)
            dout = self.dout[-1:, -rows:, head, None].float()
            found.append(
                list(torch.autograd.grad(out, leaves, dout)) if backward else [out.detach()]
            )
        of_queries, *of_keys = zip(*found, strict=True)
        return [torch.cat(of_queries, dim=2), *(functools.reduce(Tensor.add, x) for x in of_keys)]


def of_head(options: Json, head: int, rows: int) -> Json:
    """The options of one query head's last rows, for `reference.attention`."""
    own = {name: x for name, x in options.items() if name != "deterministic"}
    own |= {name: x[head, None] for name, x in own.items() if name in ("sink", "alibi_slopes")}
    if "bias" in own:
        own["bias"] = own["bias"][..., -rows:, :]
    return own


def tensor_option(name: str, shape: Shape, like: Tensor) -> Tensor:
    """A random tensor for --option NAME: a bias is one for all heads and sequences."""
    if name == "bias":
        return torch.randn(1, 1, shape.queries, shape.keys, dtype=like.dtype, device=like.device)
    return torch.rand(shape.heads, device=like.device)


TENSORS = ("alibi_slopes", "bias", "sink")
"""The names that --option takes without a value."""
