"""What a plan is made of: the mask of the whole sequence, and calls of the local op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kept import bytes_of
from .on_device import Numbers
from .sharding import Documents, Span, documents_of


@dataclass(frozen=True)
class Mask:
    """What is visible in the whole sequence."""

    left: int | None = None
    """How many keys before its own a query sees; None: all."""

    right: int | None = None
    """How many after its own; None: all. Causal is 0."""

    documents: Sequence[int] | None = None
    """cu_seqlens: nothing is visible beyond a document, nor in rows after the last."""

    @staticmethod
    def of(causal: bool, window: tuple[int, int], documents: Sequence[int] | None) -> Mask:
        """From the options of `flash_ext.attention`."""
        left, right = (None if side == -1 else side for side in window)
        return Mask(left, 0 if causal else right, documents)

    def documents_of(self, rows: int) -> Documents:
        """The documents, a sequence without any being one."""
        return documents_of((0, rows) if self.documents is None else self.documents)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return bytes_of(self.documents)


class Packed(NamedTuple):
    """Several sequences in one call, counted from the first rows of its q and k: which of a plan's
    numbers are theirs."""

    numbers: Numbers
    q: slice
    """Of cu_seqlens_q, (sequences + 1)."""

    k: slice
    used: slice | None
    """Of seqused_k, (sequences); None: all keys are used."""

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """As options of the op, int32 on a device."""
        every = self.numbers.on(device)
        found = {"cu_seqlens_q": every[self.q], "cu_seqlens_k": every[self.k]}
        return found if self.used is None else found | {"seqused_k": every[self.used]}

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        slices = (self.q, self.k, self.used or self.q)
        return sum(4 * (x.stop - x.start) for x in slices)


class Call(NamedTuple):
    """One call of the local op: rows of the rank's queries against rows of the keys at hand."""

    q: Span
    k: Span

    window: tuple[int, int] = (-1, -1)
    """As the op has it: bottom-right aligned, -1 is unlimited."""

    own: bool = False
    """Whether the keys at the queries' own positions are among the keys. Over all calls of a
    forward pass that is so exactly once for every query: this call takes the sink."""

    packed: Packed | None = None

    batch_step: int | None = None
    """Of two halves of q as a batch of two, in one call: the second half's keys begin so many rows
    after the first's; k is from the first half's first key to the second half's last."""

    used: tuple[int, int] | None = None
    """How many keys each of the halves has."""

    aligned: bool = True
    """Whether the last query and the last key of each sequence have one position: then distances,
    of ALiBi, are those of the whole sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return 512 + bytes_of(self.packed)
