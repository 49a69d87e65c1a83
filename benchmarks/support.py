"""What each variant supports on a device, by asking the package with tiny inputs."""

from __future__ import annotations

from typing import Any

import common
import torch
from torch import Tensor

import flash_ext

OPTIONS = (
    "float16",
    "bfloat16",
    "float32, float64",
    "any head dim from 1 to 256",
    "causal",
    "window",
    "scale",
    "grouped-query heads (Hq > Hk)",
    "Sq and Sk unequal",
    "strided inputs",
    "dropout",
    "gradient of lse",
    "deterministic gradients",
    "softcap",
    "ALiBi slopes",
    "bias",
    "attention sink",
    "head dim of v unlike q's",
)


def _inputs(
    device: torch.device,
    dtype: torch.dtype = torch.float16,
    d: int = 64,
    d_v: int | None = None,
    heads: tuple[int, int] = (2, 2),
    seqlens: tuple[int, int] = (16, 16),
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v of batch 1."""
    q, k, v = (
        torch.randn(1, s, h, width, dtype=dtype, device=device)
        for s, h, width in zip(
            (seqlens[0], seqlens[1], seqlens[1]), (heads[0], heads[1], heads[1]), (d, d, d_v or d),
            strict=True,
        )
    )  # fmt: skip
    return q, k, v


def _questions(
    option: str, device: torch.device
) -> list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    """The calls that all must run for an option to count as supported."""
    plain = _inputs(device)
    floats = {"dtype": torch.float32, "device": device}
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain)
    return {
        "float16": [(plain, {})],
        "bfloat16": [(_inputs(device, torch.bfloat16), {})],
        "float32, float64": [
            (_inputs(device, torch.float32), {}),
            (_inputs(device, torch.float64), {}),
        ],
        "any head dim from 1 to 256": [(_inputs(device, d=d), {}) for d in range(1, 257)],
        "causal": [(plain, {"causal": True})],
        "window": [(plain, {"window": window}) for window in ((4, -1), (-1, 4), (4, 4))],
        "scale": [(plain, {"scale": 0.5})],
        "grouped-query heads (Hq > Hk)": [(_inputs(device, heads=(4, h)), {}) for h in (1, 2)],
        "Sq and Sk unequal": [(_inputs(device, seqlens=s), {}) for s in ((8, 24), (24, 8))],
        "strided inputs": [(strided, {})],
        "dropout": [(plain, {"dropout_p": 0.1})],
        "gradient of lse": [(plain, {"return_lse": True})],
        "deterministic gradients": [(plain, {"deterministic": True})],
        "softcap": [(plain, {"softcap": 30.0})],
        "ALiBi slopes": [(plain, {"alibi_slopes": torch.ones(2, **floats)})],
        "bias": [(plain, {"bias": torch.zeros(1, 2, 16, 16, dtype=torch.float16, device=device)})],
        "attention sink": [(plain, {"sink": torch.zeros(2, **floats)})],
        "head dim of v unlike q's": [(_inputs(device, d_v=32), {})],
    }[option]


def why_not(inputs: tuple[Tensor, ...], options: dict[str, Any], variant: str) -> str | None:
    """None if a call runs, forward and backward, and its results are finite, else the reason."""
    reason = flash_ext.explain(*inputs, **options).reasons[variant]
    if reason is not None:
        return reason
    leaves = [x.detach().requires_grad_() for x in inputs]
    wants_lse = options.get("return_lse", False)
    try:
        out, lse = flash_ext.attention(
            *leaves, **options | {"variant": variant, "return_lse": True}
        )
        total = out.float().sum() + (lse.sum() if wants_lse else 0)
        results = [out, *torch.autograd.grad(total, leaves)]
    except Exception as error:
        return common.first_line(error)
    return None if all(bool(x.isfinite().all()) for x in results) else "results are not finite"


def probe(device: torch.device) -> dict[str, dict[str, str | None]]:
    """option -> variant -> None if every call of the option runs, else why one does not."""
    table: dict[str, dict[str, str | None]] = {}
    for option in OPTIONS:
        calls = _questions(option, device)
        table[option] = {}
        for name in flash_ext.VARIANTS:
            answers = (why_not(inputs, options, name) for inputs, options in calls)
            table[option][name] = next((a for a in answers if a is not None), None)
    return table
