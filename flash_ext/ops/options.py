"""The options of the ops, laid down once: the schema string and every check derive from here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

VARIANTS = ("fa1", "fa2", "fa3")
"""Every variant, oldest first. `torch.ops.flash_ext.check` returns indices into this tuple."""

CPU_VARIANTS = ("fa1", "fa2")
"""Those with CPU kernels, oldest first; "auto" means the last. fa3 is fa2 scheduled for Hopper."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keyword options of `torch.ops.flash_ext.fwd`, `bwd` and `check`, with their defaults.

    See `flash_ext.attention` for their meaning. There, `window` is one pair and the rest is alike.
    """

    scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    dropout_p: float = 0.0
    rng_state: Tensor | None = None
    deterministic: bool = False
    variant: str = "auto"

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor] | None:
        """For q and for k; None where sequences are not packed."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        return self.cu_seqlens_q, self.cu_seqlens_k


TENSOR_OPTIONS = frozenset(f.name for f in fields(Options) if "Tensor" in str(f.type))
"""The names of those that are tensors."""


class BackwardTensors(NamedTuple):
    """The positional arguments of `torch.ops.flash_ext.bwd`."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


# The keys are the annotations above as written: `annotations` from __future__ keeps them as text.
_SCHEMA_TYPES = {
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "int": "SymInt",  # a window that changes need not be compiled for each value
    "str": "str",
    "Tensor | None": "Tensor?",
}


def schema_options() -> str:
    """The options as the keyword-only part of an op schema: "*, float? scale=None, …"."""
    parts = (f"{_SCHEMA_TYPES[str(f.type)]} {f.name}={f.default!r}" for f in fields(Options))
    return "*, " + ", ".join(parts)
