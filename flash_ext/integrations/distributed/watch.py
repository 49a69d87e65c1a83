"""Whether all ranks have the same documents, which no call waits to know.

Ranks with different documents compute wrong results, and nothing else tells. So each rank has a
digest of all that it was given, and once in many calls the ranks begin to exchange it: a collective
of eight bytes beside the kernels. They look at it as many calls later, when it has long been there,
so that all of them raise in the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .on_device import captures, moved, numbers
from .transport import all_gather

EVERY = 64
"""Calls with documents from one exchange to the next: some steps of a model."""


class _Watched:
    """A group's calls with documents."""

    calls = digest = 0
    arrived: Callable[[], Tensor] | None = None
    """Every rank's digest, of the exchange that was begun last."""


_watched: WeakKeyDictionary[ProcessGroup, _Watched] = WeakKeyDictionary()


def watch(group: ProcessGroup, packing: int, device: torch.device) -> None:
    """One more call. All ranks of the group do the same.

    Args:
        group: the ranks.
        packing: a digest of this call's documents.
        device: that the group has collectives for.

    Raises:
        ValueError: ranks had different documents in an earlier call; on all of them.
        RuntimeError: an exchange failed.
    """
    if dist.get_world_size(group) == 1:
        return
    watched = _watched.setdefault(group, _Watched())
    watched.calls += 1
    watched.digest = hash((watched.digest, packing))
    if watched.calls % EVERY or captures(device):
        return
    arrived, watched.arrived = watched.arrived, _exchange(group, watched.digest, device)
    if arrived is not None and len(set(arrived().tolist())) > 1:
        raise ValueError(
            "flash_ext: the ranks of the group must agree: cu_seqlens, or the number of rows, was"
            f" not the same on all of them in one of the last {2 * EVERY} calls with cu_seqlens;"
            " with FLASH_EXT_DEBUG=1 in the environment that call raises, and says what differs"
        )


def _exchange(group: ProcessGroup, digest: int, device: torch.device) -> Callable[[], Tensor]:
    """Begin an exchange, and return what waits for it and gives every rank's digest."""
    mine = moved(numbers([digest]), device)
    every = mine.new_empty(dist.get_world_size(group))
    work = all_gather(every, mine, group=group, async_op=True)
    if device.type == "cpu":

        def waited() -> Tensor:
            work.wait()
            return every

        return waited
    found = torch.empty(every.shape, dtype=every.dtype, device="cpu", pin_memory=True)
    with torch.cuda.stream(_beside(device)):  # what the caller's stream does must not wait
        work.wait()
        found.copy_(every, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    for x in (mine, every):  # of the caller's stream, which may take their memory again
        x.record_stream(_beside(device))

    def arrived() -> Tensor:
        event.synchronize()
        return found

    return arrived


@lru_cache(maxsize=64)
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
