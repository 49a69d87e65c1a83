"""What each variant supports on a device: what `flash_ext.explain` says of a call of each feature.

    python benchmarks/support.py

A feature is supported if the variant takes all of its calls, and backward if their gradients exist
too; otherwise the first reason is kept. Nothing runs here: that what is taken is right, bit by bit
where that is promised, under torch.compile and in CUDA graphs, is for the tests (`make gpu-test`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def wanted(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An option that requires a gradient."""
        return self.zeros(*shape, dtype=dtype).requires_grad_()

    def dense(
        self,
        d: int = 64,
        d_v: int | None = None,
        heads: tuple[int, int] = (2, 2),
        seqlens: tuple[int, int] = (24, 40),
        dtypes: tuple[torch.dtype, torch.dtype] = (HALF, HALF),
        **options: Any,
    ) -> Call:
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

    def biases(self, make: Callable[..., Tensor]) -> Iterator[Call]:
        """Every way of broadcasting, and one bias for packed sequences."""
        for dtype in (HALF, torch.float32):
            for shape in itertools.product((2, 1), (2, 1), (24, 1), (40, 1)):
                yield self.dense(bias=make(*shape, dtype=dtype))
            yield self.packed(bias=make(3, 4, 20, 30, dtype=dtype))

    def dropout(self) -> dict[str, Any]:
        return {"dropout_p": 0.2, "rng_state": torch.tensor([3, 4], device=self.device)}

    def eight_bits(self, dtype: torch.dtype) -> Iterator[Call]:
        """Descales of each shape: numbers, by heads, by blocks and channels."""
        number, by_head = self.zeros(), self.zeros(2, 2)
        blocks = self.zeros(2, 4, 2), self.zeros(2, 2, 3), self.zeros(2, 2, 64)
        for descales in ((None,) * 3, (number, number[None], number), (by_head,) * 3, blocks):
            names = ("q_descale", "k_descale", "v_descale")
            given = {name: x for name, x in zip(names, descales, strict=True) if x is not None}
            yield self.dense(heads=(4, 2), seqlens=(140, 300), dtypes=(dtype, FP8), causal=True,
                             **given)  # fmt: skip

    def layouts(self) -> Iterator[Call]:
        plain = self.dense(heads=(4, 2))[:3]
        q, k, v = plain
        yield *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain), {}  # type: ignore
        yield *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain), {}  # type: ignore
        yield *self.zeros(2, 24, 8, 64, dtype=HALF).split((4, 2, 2), dim=2), {}  # type: ignore
        yield q, k[:, :, :1].expand_as(k), v, {}
        yield q, k, v[:1].expand_as(v), {}

    def unaligned(self) -> Iterator[Call]:
        def odd_rows(x: Tensor) -> Tensor:
            wide = x.new_zeros(*x.shape[:2], x[0, 0].numel() + 1)[..., :-1]
            return wide.unflatten(2, x.shape[2:])

        def odd_offset(x: Tensor) -> Tensor:
            return x.new_zeros(x.numel() + 1)[1:].view(x.shape)

        for change in (odd_rows, odd_offset):
            q, k, v, options = self.dense(heads=(4, 2))
            yield change(q), change(k), change(v), options

    def everything(self, call: Call, shape: tuple[int, ...]) -> Call:
        """All options at once."""
        q, k, v, options = call
        packed, heads = "cu_seqlens_q" in options, q.shape[-2]
        return q, k, v, options | self.dropout() | {
            "causal": True, "window": (20, -1), "softcap": 30.0, "scale": 0.2,
            "alibi_slopes": self.zeros(heads), "bias": self.wanted(*shape, dtype=HALF),
            "sink": self.wanted(heads), "deterministic": True,
            "seqused_k": self.integers(*([30, 4, 0] if packed else [40, 33])),
        }  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """A row of the table: calls that must all be taken."""

    calls: Callable[[Ask], Iterable[Call]]
    directions: tuple[str, ...] = BOTH


FEATURES = {
    "float16": Feature(lambda a: [a.dense()]),
    "bfloat16": Feature(lambda a: [a.dense(dtypes=(torch.bfloat16,) * 2)]),
    "float32, float64": Feature(
        lambda a: (a.dense(dtypes=(x, x)) for x in (torch.float32, torch.float64))
    ),
    "FP8 (float8_e4m3fn), descales of every shape": Feature(lambda a: a.eight_bits(FP8)),
    "q and k in int8, v in FP8": Feature(lambda a: a.eight_bits(torch.int8), BOTH[:1]),
    f"head dims up to {LARGEST}, multiples of 8": Feature(
        lambda a: (a.dense(d=d, seqlens=(9, 17)) for d in range(8, LARGEST + 1, 8))
    ),
    "every other head dim": Feature(
        lambda a: (a.dense(d=d, seqlens=(9, 17)) for d in range(1, LARGEST + 1))
    ),
    "head dim of v unlike q's, multiples of 8": Feature(
        lambda a: (a.dense(*x) for x in ((192, 128), (128, 64), (40, 256)))
    ),
    "the same, others": Feature(lambda a: (a.dense(*x) for x in ((63, 128), (64, 1)))),
    "causal, Sq and Sk unequal": Feature(
        lambda a: (a.dense(seqlens=x, causal=True) for x in ((24, 40), (40, 24), (1, 70)))
    ),
    "window": Feature(lambda a: (a.dense(window=w) for w in ((4, -1), (-1, 4), (4, 4)))),
    "scale": Feature(lambda a: [a.dense(scale=0.3)]),
    "grouped and multi-query heads": Feature(
        lambda a: (a.dense(heads=x) for x in ((4, 2), (6, 2), (4, 1)))
    ),
    "any strides (heads first, packed qkv, expanded)": Feature(Ask.layouts),
    "unaligned rows and addresses": Feature(Ask.unaligned),
    "dropout": Feature(lambda a: [a.dense(**a.dropout()), a.packed(**a.dropout())]),
    "softcap": Feature(lambda a: [a.dense(softcap=5.0), a.packed(softcap=5.0)]),
    "ALiBi, slopes (H) and (B, H)": Feature(
        lambda a: (a.dense(alibi_slopes=a.zeros(*x)) for x in ((2,), (2, 2)))
    ),
    "bias, every broadcast, float32 too": Feature(lambda a: a.biases(a.zeros)),
    "gradient of bias": Feature(lambda a: a.biases(a.wanted), BOTH[1:]),
    "bool mask": Feature(
        lambda a: (
            a.dense(bias=a.zeros(*x, dtype=torch.bool))
            for x in ((2, 2, 24, 40), (1, 1, 24, 40), (2, 1, 1, 40))
        )
    ),
    "sink": Feature(lambda a: [a.dense(sink=a.zeros(2)), a.packed(sink=a.zeros(4))]),
    "gradient of sink": Feature(
        lambda a: [a.dense(sink=a.wanted(2)), a.packed(sink=a.wanted(4))], BOTH[1:]
    ),
    "packed sequences (attention_varlen)": Feature(
        lambda a: [a.packed(), a.packed(causal=True), a.packed(d=128, d_v=64)]
    ),
    "seqused_k": Feature(
        lambda a: [
            a.dense(seqused_k=a.integers(33, 0), causal=True),
            a.packed(seqused_k=a.integers(20, 3, 0)),
        ]
    ),
    "all options at once": Feature(
        lambda a: [
            a.everything(a.dense(heads=(4, 2), d_v=32), (1, 4, 24, 1)),
            a.everything(a.packed(d_v=32), (1, 4, 20, 30)),
        ]
    ),
    "deterministic": Feature(lambda a: [a.dense(seqlens=(300, 300), deterministic=True)]),
}


def why_not(feature: Feature, ask: Ask, variant: str, direction: str) -> str | None:
    """None if every call of a feature is taken, otherwise the first reason."""
    for q, k, v, options in feature.calls(ask):
        if reason := refusal(variant, q, k, v, direction == "backward", **options):
            return reason
    return None


def probe(device: torch.device) -> Json:
    """feature -> variant -> direction -> None if it is supported, otherwise why not."""
    ask = Ask(device)
    variants = flash_ext.CPU_VARIANTS if device.type == "cpu" else flash_ext.VARIANTS
    return {
        name: {v: {d: why_not(feature, ask, v, d) for d in feature.directions} for v in variants}
        for name, feature in FEATURES.items()
    }


def main() -> int:
    """Ask the device everything."""
    parser = common.parser(__doc__)
    common.add_device(parser)
    args = parser.parse_args()
    recorder = common.begin("support", args)
    for name, by_variant in probe(recorder.device).items():
        recorder.add({"feature": name}, {"answers": by_variant})
        for variant, by_direction in by_variant.items():
            words = [f"{d} {reason or 'yes'}" for d, reason in by_direction.items()]
            print(f"  {variant}: {', '.join(words)}")
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
