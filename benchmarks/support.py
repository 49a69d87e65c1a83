"""What each variant supports on a device: what `flash_ext.explain` says of a call of each feature.

    python benchmarks/support.py

A feature is supported if the variant takes all of its calls, and backward if their gradients exist
too; otherwise the first reason is kept. Nothing runs here: that what is taken is right, in every
shape, layout and combination, bit by bit where that is promised, under torch.compile and in CUDA
graphs, is for the tests (`make gpu-test`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import common
import torch
from common import Json
from providers import refusal
from torch import Tensor

import flash_ext

BOTH = ("forward", "backward")
FP8, HALF = torch.float8_e4m3fn, torch.float16
LARGEST = max(d for d, _ in flash_ext.KERNEL_DIMS)
Call = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # q, k, v, options


class Ask:
    """Makes the calls of every feature, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device, **options)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def dense(
        self, d: int = 64, d_v: int | None = None, heads: tuple[int, int] = (2, 2),
        seqlens: tuple[int, int] = (24, 40), dtypes: tuple[torch.dtype, torch.dtype] = (HALF, HALF),
        **options: Any
    ) -> Call:  # fmt: skip
        """A call with a batch of two; types of q and k, and of v."""
        (sq, sk), (hq, hk), (dtype, dtype_v) = seqlens, heads, dtypes
        q, k = self.zeros(2, sq, hq, d, dtype=dtype), self.zeros(2, sk, hk, d, dtype=dtype)
        return q, k, self.zeros(2, sk, hk, d_v or d, dtype=dtype_v), options

    def packed(self, d: int = 64, d_v: int | None = None, **options: Any) -> Call:
        """Sequences of 20, 0 and 13 queries over 30, 5 and 0 keys, and three unused rows."""
        shapes = ((36, 4, d), (38, 2, d), (38, 2, d_v or d))
        q, k, v = (self.zeros(*shape, dtype=HALF) for shape in shapes)
        cu = {"cu_seqlens_q": self.integers(0, 20, 20, 33)}
        cu |= {"cu_seqlens_k": self.integers(0, 30, 35, 35)}
        return q, k, v, cu | options

    def biases(self, **grad: bool) -> Iterable[Call]:
        """Every way of broadcasting, of 16 and 32 bits."""
        for dtype in (HALF, torch.float32):
            for shape in itertools.product((2, 1), (2, 1), (24, 1), (40, 1)):
                yield self.dense(bias=self.zeros(*shape, dtype=dtype, **grad))

    def packed_bias(self, **grad: bool) -> Iterable[Call]:
        """One bias for packed sequences."""
        types = (HALF, torch.float32)
        return (self.packed(bias=self.zeros(3, 4, 20, 30, dtype=x, **grad)) for x in types)

    def eight_bits(self, dtype: torch.dtype) -> Iterable[Call]:
        """Descales by numbers, by heads, by blocks and channels."""
        number, by_head = self.zeros(), self.zeros(2, 2)
        blocks = self.zeros(2, 4, 2), self.zeros(2, 2, 3), self.zeros(2, 2, 64)
        for descales in ((number,) * 3, (by_head,) * 3, blocks):
            names = ("q_descale", "k_descale", "v_descale")
            yield self.dense(heads=(4, 2), seqlens=(140, 300), dtypes=(dtype, FP8), causal=True,
                             **dict(zip(names, descales, strict=True)))  # fmt: skip

    def unaligned(self) -> Call:
        """Rows that begin at odd multiples of two bytes."""
        q, k, v, options = self.dense(heads=(4, 2))
        wide = (x.new_zeros(*x.shape[:2], x[0, 0].numel() + 1)[..., :-1] for x in (q, k, v))
        return *(x.unflatten(2, (-1, 64)) for x in wide), options  # type: ignore[return-value]

    def dropout(self) -> dict[str, Any]:
        return {"dropout_p": 0.2, "rng_state": torch.tensor([3, 4], device=self.device)}


# Calls that must all be taken.
FEATURES: dict[str, Callable[[Ask], Iterable[Call]]] = {
    "float16": lambda a: [a.dense()],
    "bfloat16": lambda a: [a.dense(dtypes=(torch.bfloat16,) * 2)],
    "float32, float64": lambda a: (a.dense(dtypes=(x, x)) for x in (torch.float32, torch.float64)),
    "FP8 (float8_e4m3fn), descales of every shape": lambda a: a.eight_bits(FP8),
    "q and k in int8, v in FP8": lambda a: a.eight_bits(torch.int8),
    f"head dims up to {LARGEST}, multiples of 8": lambda a: (
        a.dense(d=d) for d in range(8, LARGEST + 1, 8)
    ),
    "every other head dim": lambda a: (a.dense(d=d) for d in range(1, LARGEST + 1)),
    "head dim of v unlike q's, multiples of 8": lambda a: (
        a.dense(*x) for x in ((192, 128), (128, 64), (40, 256))
    ),
    "the same, others": lambda a: (a.dense(*x) for x in ((63, 128), (64, 1))),
    "causal, Sq and Sk unequal": lambda a: (
        a.dense(seqlens=x, causal=True) for x in ((24, 40), (40, 24), (1, 70))
    ),
    "window": lambda a: (a.dense(window=w) for w in ((4, -1), (-1, 4), (4, 4))),
    "scale": lambda a: [a.dense(scale=0.3)],
    "grouped and multi-query heads": lambda a: (a.dense(heads=x) for x in ((4, 2), (6, 2), (4, 1))),
    "unaligned rows and addresses": lambda a: [a.unaligned()],
    "dropout": lambda a: [a.dense(**a.dropout()), a.packed(**a.dropout())],
    "softcap": lambda a: [a.dense(softcap=5.0), a.packed(softcap=5.0)],
    "ALiBi, slopes (H) and (B, H)": lambda a: (
        a.dense(alibi_slopes=a.zeros(*x)) for x in ((2,), (2, 2))
    ),
    "bias of a dense batch, every broadcast, float32 too": lambda a: a.biases(),
    "gradient of such a bias": lambda a: a.biases(requires_grad=True),
    "bias of packed sequences": lambda a: a.packed_bias(),
    "gradient of a bias of packed sequences": lambda a: a.packed_bias(requires_grad=True),
    "bool mask": lambda a: [a.dense(bias=a.zeros(2, 1, 1, 40, dtype=torch.bool))],
    "sink": lambda a: [a.dense(sink=a.zeros(2)), a.packed(sink=a.zeros(4))],
    "gradient of sink": lambda a: [a.dense(sink=a.zeros(2, requires_grad=True))],
    "packed sequences (attention_varlen)": lambda a: [a.packed(causal=True), a.packed(128, 64)],
    "seqused_k": lambda a: [
        a.dense(seqused_k=a.integers(33, 0)),
        a.packed(seqused_k=a.integers(20, 3, 0)),
    ],
    "deterministic": lambda a: [a.dense(seqlens=(300, 300), deterministic=True)],
}


def directions_of(feature: str) -> tuple[str, ...]:
    """Those in which a feature is asked for."""
    if feature.startswith("gradient"):
        return BOTH[1:]
    return BOTH[:1] if "int8" in feature else BOTH


def why_not(feature: str, ask: Ask, variant: str, direction: str) -> str | None:
    """None if every call of a feature is taken, otherwise the first reason."""
    for q, k, v, options in FEATURES[feature](ask):
        if reason := refusal(variant, q, k, v, direction == "backward", **options):
            return reason
    return None


def probe(device: torch.device) -> Json:
    """feature -> variant -> direction -> None if it is supported, otherwise why not."""
    ask = Ask(device)
    variants = flash_ext.CPU_VARIANTS if device.type == "cpu" else flash_ext.VARIANTS
    return {
        name: {v: {d: why_not(name, ask, v, d) for d in directions_of(name)} for v in variants}
        for name in FEATURES
    }


def main() -> int:
    recorder = common.begin("support", common.parser(__doc__, device=True).parse_args())
    for name, by_variant in probe(recorder.device).items():
        recorder.add({"feature": name}, {"answers": by_variant})
        for variant, by_direction in by_variant.items():
            words = [f"{d} {reason or 'yes'}" for d, reason in by_direction.items()]
            print(f"  {variant}: {', '.join(words)}")
    return recorder.close()


if __name__ == "__main__":
    sys.exit(main())
