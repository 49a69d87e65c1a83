"""One call of attention with any options: support.py checks it and options.py times it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from providers import refusal
from torch import Tensor

import flash_ext
import flash_ext.reference


@dataclass(frozen=True)
class Call:
    """The arguments of flash_ext.attention, or of attention_varlen where there is a cu_seqlens_q.

    A tensor option that requires a gradient gets one, as q, k and v do.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    through_lse: bool = False  # the loss uses lse too

    @property
    def packed(self) -> bool:
        """Whether q, k, v are (total, heads, head_dim)."""
        return "cu_seqlens_q" in self.options

    def attend(self, variant: str) -> tuple[Tensor, Tensor]:
        """(out, lse) of a variant of flash_ext."""
        function = flash_ext.attention_varlen if self.packed else flash_ext.attention
        return function(self.q, self.k, self.v, **self.options, variant=variant, return_lse=True)

    def refusal(self, variant: str, gradients: bool = False) -> str | None:
        """Why a variant of flash_ext does not run this call; None where it does."""
        return refusal(variant, self.q, self.k, self.v, gradients, **self.options)

    def exact(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of standard attention in the inputs' type."""
        name = "attention_varlen" if self.packed else "attention"
        options = {n: x for n, x in self.options.items() if n != "deterministic"}
        return getattr(flash_ext.reference, name)(self.q, self.k, self.v, **options)

    def convert(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with every floating-point tensor passed through ``function``."""

        def one(x: Any) -> Any:
            return function(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        options = {name: one(x) for name, x in self.options.items()}
        return dataclasses.replace(
            self, q=one(self.q), k=one(self.k), v=one(self.v), options=options
        )

    def to(self, dtype: torch.dtype) -> Call:
        """The same call in another type."""
        return self.convert(lambda x: x.detach().to(dtype).requires_grad_(x.requires_grad))

    def leaves(self) -> dict[str, Tensor]:
        """q, k, v and the options that require a gradient."""
        options = {n: x for n, x in self.options.items() if isinstance(x, Tensor)}
        wanted = {n: x for n, x in options.items() if x.requires_grad}
        return {"q": self.q, "k": self.k, "v": self.v} | wanted

    def first_heads(self) -> Call:
        """Only the query heads of the first key head, and of a dense call only the first batch
        entry: this part can be checked exactly without the memory for the rest."""
        group = self.q.shape[-2] // self.k.shape[-2]
        batch = slice(None) if self.packed else slice(1)

        def part(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if name == "bias":
                return x[:1, :group] if not self.packed else x[:, :group]
            if name in ("sink", "alibi_slopes"):
                return x[..., :group]
            return x[batch] if name == "seqused_k" else x

        q, k, v = (x[batch, ..., :n, :] for x, n in zip(
            (self.q, self.k, self.v), (group, 1, 1), strict=True
        ))  # fmt: skip
        options = {name: part(name, x) for name, x in self.options.items()}
        return dataclasses.replace(self, q=q, k=k, v=v, options=options)


Attend = Callable[[Call], tuple[Tensor, Tensor | None]]  # -> out, lse


def forward(call: Call, attend: Attend) -> Callable[[], Tensor]:
    """The forward call to be timed, without gradients; it returns out."""

    def run() -> Tensor:
        with torch.no_grad():
            return attend(call)[0]

    return run


def backward(
    call: Call, attend: Attend, dout: Tensor, dlse: Tensor | None = None
) -> Callable[[], dict[str, Tensor]]:
    """The backward call to be timed, on a graph built here; it returns every leaf's gradient."""
    for name in ("q", "k", "v"):
        leaf = getattr(call, name).detach().requires_grad_()
        call = dataclasses.replace(call, **{name: leaf})
    leaves = call.leaves()
    out, lse = attend(call)
    outputs, grads = ((out, lse), (dout, dlse)) if call.through_lse else ((out,), (dout,))

    def run() -> dict[str, Tensor]:
        found = torch.autograd.grad(outputs, tuple(leaves.values()), grads, retain_graph=True)
        return {f"d{name}": x for name, x in zip(leaves, found, strict=True)}

    return run
