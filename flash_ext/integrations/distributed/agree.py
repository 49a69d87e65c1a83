"""Ranks that disagree in a new call raise, all of them, instead of waiting for each other.

Before the first call of every new signature the ranks of a group exchange it: shapes, dtype,
options. Later calls of the same signature exchange nothing. So where a call is new to some ranks
and known to others, the former wait for an exchange that the latter do not enter, until the group's
timeout.

Packed documents and their number of rows are compared in that exchange, but are no part of the
signature: they change with every step, whose host must not wait. Afterwards a rank checks only its
own, and `watch` compares a digest of all of them now and then. With FLASH_EXT_DEBUG=1 every call
with documents has an exchange, which names at once what differs.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .watch import watch

Signature = dict[str, Any]
"""What must be the same on every rank, by name. Values compare and have a hash."""

ERROR = "error"
"""The name under which a rank says that its own arguments are wrong."""

MOST_KNOWN = 4096
"""Signatures that are remembered."""

MOST_CHECKED = 64
"""Packings that are remembered."""


class _Known:
    """What a group has agreed on."""

    def __init__(self) -> None:
        self.signatures: set[Hashable] = set()
        self.checked: OrderedDict[Hashable, None] = OrderedDict()  # with packings; the newest last


_known: WeakKeyDictionary[ProcessGroup, _Known] = WeakKeyDictionary()


def agree(
    groups: Sequence[ProcessGroup],
    signature: Signature,
    packing: Signature,
    here: Hashable,
    check: Callable[[], object],
    check_packing: Callable[[], object],
    device: torch.device,
) -> None:
    """Return if every rank has this signature.

    Args:
        groups: one group; or the groups of a mesh of which this rank is part, the last dimension's
            first. All their ranks call this.
        signature: what must be the same on every rank.
        packing: the same of packed documents; empty without any.
        here: what else makes the call a new one, and may differ between ranks.
        check: raises ValueError or RuntimeError for arguments that are wrong on this rank. Called
            only if the signature is new.
        check_packing: the same of the packing alone, if only that is new.
        device: of the tensors.

    Raises:
        ValueError: on every rank, naming the ranks, what differs and the values; or what is wrong
            on one of them. If only the packing is new: what is wrong on this rank.
        RuntimeError: a rank did not come before the group's timeout.
    """
    known = _known.setdefault(groups[-1], _Known())
    this = tuple(packing.values()), here
    key = tuple(signature.items()), None if packing else here
    checked = key, this
    debugs = packing and os.environ.get("FLASH_EXT_DEBUG", "0") not in ("", "0")
    if debugs or key not in known.signatures:
        _exchange_all(groups, signature | packing, check)
        if len(known.signatures) == MOST_KNOWN:  # on every rank, so all forget at the same call
            known.signatures.clear()
        known.signatures.add(key)
    elif packing and checked not in known.checked:
        check_packing()
    if packing:
        known.checked[checked] = None
        known.checked.move_to_end(checked)
        if len(known.checked) > MOST_CHECKED:
            known.checked.popitem(last=False)
        for group in groups:
            watch(group, hash(tuple(packing.values())), device)


def _exchange_all(
    groups: Sequence[ProcessGroup], signature: Signature, check: Callable[[], object]
) -> None:
    """Raise if ranks differ, or if something is wrong on one of them."""
    try:
        check()
    except (ValueError, RuntimeError) as error:
        signature = {ERROR: str(error).removeprefix("flash_ext: ")}
    found = [signature]
    for group in groups:
        found = _exchange(group, found)
    if difference := disagreement(found):
        raise ValueError(f"flash_ext: {difference}")


def _exchange(group: ProcessGroup, mine: list[Signature]) -> list[Signature]:
    """What every rank has, in the order of ranks."""
    if dist.get_world_size(group) == 1:
        return mine
    every: list[list[Signature]] = [[] for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather_object(every, mine, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            "flash_ext: the exchange of shapes and options before the first call of its kind did"
            f" not complete: {error}"
        ) from error
    return [signature for signatures in every for signature in signatures]


def disagreement(signatures: list[Signature]) -> str | None:
    """What is wrong, in words, or None where all are equal.

    Args:
        signatures: of every rank, in order.
    """
    wrong = [(rank, s[ERROR]) for rank, s in enumerate(signatures) if ERROR in s]
    if wrong:
        rank, message = wrong[0]
        others = "" if len(wrong) == 1 else f", and {len(wrong) - 1} more"
        where = "" if len(wrong) == len(signatures) else f" (on rank {rank} of the group{others})"
        return f"{message}{where}"
    differences = []
    for name in signatures[0]:
        values = [s.get(name) for s in signatures]
        if any(x != values[0] for x in values):
            said = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            differences.append(f"{name} is {said}")
    if not differences:
        return None
    return "the ranks of the group must agree: " + "; ".join(differences)
