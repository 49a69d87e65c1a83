"""Quantized q, k and v, and the ways to get them: what all benchmarks of FP8 attention share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import common  # noqa: F401  (makes flash_ext importable from a checkout)
import torch
from torch import Tensor

import flash_ext
import flash_ext.reference
from flash_ext import fp8

SCALE_ROWS = 128  # rows of a block
LARGEST = torch.finfo(torch.float8_e4m3fn).max
EMULATION = "standard attention, P in e4m3"  # where no variant takes a call


class Quantized(NamedTuple):
    """8-bit numbers and what they are multiplied by, as `flash_ext.attention` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def descales(self) -> dict[str, Tensor | None]:
        """The three, by the name of their option."""
        return {name: getattr(self, name) for name in ("q_descale", "k_descale", "v_descale")}

    def first_queries(self, rows: int) -> Quantized:
        """Only the first rows of q."""
        descale = self.q_descale
        if descale is not None and descale.dim() == 3:
            descale = descale[..., : (rows + SCALE_ROWS - 1) // SCALE_ROWS].contiguous()
        return self._replace(q=self.q[:, :rows], q_descale=descale)

    def variant(self, causal: bool = False) -> str | None:
        """The variant that takes them; None where none does."""
        call = self.q, self.k, self.v
        return flash_ext.explain(*call, causal=causal, **self.descales).variant

    def attend(self, causal: bool = False, out_dtype: torch.dtype = torch.float16) -> Tensor:
        """out, from a variant; where none takes them, from standard attention that rounds P."""
        module: Any = flash_ext if self.variant(causal) else flash_ext.reference
        out = module.attention(
            self.q, self.k, self.v, causal=causal, out_dtype=out_dtype, **self.descales
        )
        return out[0] if isinstance(out, tuple) else out

    def exact(self) -> Tensor:
        """out in float64, where nothing is rounded, without a mask."""
        found: Tensor = flash_ext.reference.attention(
            self.q, self.k, self.v, out_dtype=torch.float64, **self.descales
        )[0]
        return found


@dataclass(frozen=True)
class Method:
    """How float16 or bfloat16 becomes FP8; see `flash_ext.fp8.quantize`."""

    scales: str  # of q and k
    scales_v: str
    rotated: bool = False
    smooth: bool = False  # is the mean of k subtracted?
    qk_dtype: torch.dtype = torch.float8_e4m3fn

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seed: int = 0) -> Quantized:
        """Quantize; the rotation's signs are the seed's."""
        signs = None
        if self.rotated:
            generator = torch.Generator().manual_seed(seed)
            signs = fp8.random_signs(q.shape[-1], generator=generator).to(q.device)
        mean = fp8.token_mean(k) if self.smooth else None
        pairs = (
            fp8.quantize(q, self.qk_dtype, scales=self.scales, signs=signs),
            fp8.quantize(k, self.qk_dtype, scales=self.scales, signs=signs, mean=mean),
            fp8.quantize(v, scales=self.scales_v),
        )
        numbers, descales = zip(*pairs, strict=True)
        return Quantized(*numbers, *descales)


PER_TENSOR = "one scale per tensor"
OURS_IN_FP8 = "flash_ext.fp8.attention in FP8: the same, with v by channels"
OURS = "flash_ext.fp8.attention: the same, with q and k in int8"
METHODS = {
    PER_TENSOR: Method("tensor", "tensor"),
    "one scale per tensor, rotation": Method("tensor", "tensor", rotated=True),
    "one scale per head": Method("head", "head"),
    "blocks of q and k, v by heads": Method("block", "head"),
    "blocks and rotation": Method("block", "head", rotated=True),
    "blocks and rotation, mean of k subtracted": Method("block", "head", True, True),
    OURS_IN_FP8: Method("block", "channel", rotated=True, smooth=True),
    OURS: Method("block", "channel", rotated=True, smooth=True, qk_dtype=torch.int8),
}
