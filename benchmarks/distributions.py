"""The inputs that errors are measured on: what is done to independent standard normal entries."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def normal(x: dict[str, Tensor]) -> None:
    """Leaves what came: independent standard normal entries."""


def outliers(x: dict[str, Tensor]) -> None:
    """One entry of q, k and v in a thousand gets N(0, 100) added (FlashAttention-3, §4.3)."""
    for name in ("q", "k", "v"):
        chosen = torch.rand_like(x[name]) < 1e-3
        x[name] += chosen * 10 * torch.randn_like(x[name])


def large_logits(x: dict[str, Tensor]) -> None:
    """Scores of standard deviation 32: exp of the largest is beyond float32."""
    x["q"] *= 32


def rising_maximum(x: dict[str, Tensor]) -> None:
    """Scores grow along the keys, by 128 from end to end: every block raises the maximum."""
    d = x["q"].shape[-1]
    x["q"][..., 0] = math.sqrt(d)  # score += k[..., 0], before the scale of 1 / sqrt(d)
    x["k"][..., 0] += torch.linspace(0, 128, x["k"].shape[1], device=x["k"].device)[:, None]


DISTRIBUTIONS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "normal": normal,
    "outliers": outliers,
    "large logits": large_logits,
    "rising maximum": rising_maximum,
}
