"""K and V in 8 bits beside a q in bfloat16: what `compare.py --set decode8` measures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from fp8_providers import not_called
from providers import Attend, Provider, Refused, Workload
from torch import Tensor

import flash_ext
from flash_ext import fp8

KV8 = "kv8"  # the dtype of cells of such attention
Descales = dict[str, Tensor]


class KeysAndValues(NamedTuple):
    """k by blocks of keys and v by channels, in 8 bits, and what they are multiplied by."""

    k: Tensor
    v: Tensor
    descales: Descales

    @classmethod
    def of(cls, k: Tensor, v: Tensor, dtype: torch.dtype) -> KeysAndValues:
        """Quantize."""
        k8, k_descale = fp8.quantize(k, dtype)
        if dtype == torch.int8:
            v_descale = v.abs().amax(1).float() / torch.iinfo(dtype).max
            v8 = torch.stack([(x / y).round().to(dtype) for x, y in zip(v, v_descale, strict=True)])
        else:
            v8, v_descale = fp8.quantize(v, dtype, scales="channel")
        return cls(k8, v8, {"k_descale": k_descale, "v_descale": v_descale})

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """In bfloat16, a batch element at a time."""
        rows = self.descales["k_descale"].repeat_interleave(128, dim=2)[..., : self.k.shape[1]]
        factors = rows.mT[..., None], self.descales["v_descale"][:, None]

        def product(x: Tensor, factor: Tensor) -> Tensor:
            pairs = zip(x, factor, strict=True)
            return torch.stack([(a.float() * b).bfloat16() for a, b in pairs])

        return product(self.k, factors[0]), product(self.v, factors[1])


@dataclass(frozen=True)
class Kv8Provider(Provider):
    """flash_ext's fa3 on k and v that were quantized before; only a `Kv8Workload` asks it."""

    attend: Attend = not_called
    fp8: bool = True
    kv_dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def ours(self) -> bool:
        return True

    def prepare(self, q: Tensor, x: KeysAndValues, causal: bool) -> Callable[[], Tensor]:
        """The call to be timed."""
        reason = flash_ext.explain(q, x.k, x.v, causal=causal, **x.descales).reasons["fa3"]
        if reason is not None:
            raise Refused(reason)
        return lambda: flash_ext.attention(q, x.k, x.v, causal=causal, variant="fa3", **x.descales)


KV8_PROVIDERS = (
    Kv8Provider("fa3_e4m3_kv"),
    Kv8Provider("fa3_int8_kv", kv_dtype=torch.int8),
)


class Kv8Workload(Workload):
    """Inputs in bfloat16, and the same k and v in 8 bits.

    A provider of these is held against the exact results of what they stand for, the others against
    those of the bfloat16 inputs.
    """

    BESIDE = ("fa3", "flash_attn_3")  # who is measured beside 8 bits, in bfloat16
    CHUNK_BYTES = 1 << 24  # heads have up to 131,072 keys, and one query

    def __init__(
        self, shape: tuple[int, int, int, int], device: torch.device, seqlen_q: int, kv_heads: int
    ) -> None:
        super().__init__(shape, torch.bfloat16, device, seqlen_q, kv_heads)
        self.numbers = {p.name: KeysAndValues.of(self.k, self.v, p.kv_dtype) for p in KV8_PROVIDERS}
        self.of_numbers: dict[str, list[Tensor]] = {}

    def asked(self, providers: Iterable[Provider]) -> list[Provider]:
        return [p for p in providers if p.name in (*self.BESIDE, *self.numbers)]

    def exact(self, causal: bool, gradients: bool) -> list[Tensor]:
        for name, numbers in self.numbers.items():
            dequantized = copy.copy(self)
            dequantized.k, dequantized.v = numbers.dequantized()
            self.of_numbers[name] = Workload.exact(dequantized, causal, gradients=False)
        return super().exact(causal, gradients)

    def wanted(self, provider: Provider, exact: list[Tensor]) -> list[Tensor]:
        return self.of_numbers.get(provider.name, exact)

    def bare(self, provider: Provider, causal: bool) -> Callable[[], Tensor]:
        if not isinstance(provider, Kv8Provider):
            return super().bare(provider, causal)
        return provider.prepare(self.q, self.numbers[provider.name], causal)
