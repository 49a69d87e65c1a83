"""Which groups have `engines.CopyEngines`, and their memory: torch's symmetric memory.

That is a private interface of torch (`ops.torch_private`), tried once in each group: if torch
lacks it, if ranks are on several hosts, or where what one rank wrote is not what others read,
the group has `Collectives`. All ranks of a group choose alike.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.checks import refuse
from ...ops.torch_private import SymmetricMemory, symmetric_memory
from .engines import GRAIN, Copy, CopyEngines, Staging
from .sharding import Sharding
from .transport import Collectives, Transport

TIMEOUT = 600
"""Seconds until a barrier that a rank does not come to ends the process, as NCCL's do."""

_found: WeakKeyDictionary[ProcessGroup, Staging | str] = WeakKeyDictionary()


def _every(group: ProcessGroup, mine: Any) -> list[Any]:
    """What every rank has, in the order of ranks."""
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


class SymmetricWindow:
    """A window of torch's symmetric memory."""

    def __init__(
        self, group: ProcessGroup, stream: torch.cuda.Stream, before: _Before, capacity: int
    ) -> None:
        """All ranks of the group together.

        Raises:
            RuntimeError: on every rank, if one of them does not have so much memory.
        """
        memory = symmetric_memory()
        assert memory is not None, "`_try` looked"
        device = stream.device
        self._stream, self._before = stream, before
        try:
            self._mine = _allocate(memory, capacity, device)
            torch.cuda.synchronize(device)  # torch has zeroed it, before another rank writes it
            failed = None
        except RuntimeError as error:
            failed = (
                f"flash_ext: no {capacity} bytes for copies between GPUs (transport='collectives'"
                f" needs none): {error}"
            )
        for reason in _every(group, failed):
            if reason is not None:
                raise RuntimeError(reason)
        self._handle = memory.rendezvous(self._mine, group)
        self.rank = dist.get_rank(group)
        self.buffers: Sequence[Tensor] = [
            self._mine
            if rank == self.rank
            else self._handle.get_buffer(rank, (capacity,), torch.uint8)
            for rank in range(dist.get_world_size(group))
        ]

    def follow(self) -> None:
        """As `Window` says."""
        current = torch.cuda.current_stream(self._stream.device_index)
        if self._before.stream is not None and self._before.stream != current:
            current.wait_stream(self._before.stream)
        self._before.stream = current

    def drain(self) -> None:
        """As `Window` says."""
        torch.cuda.current_stream(self._stream.device_index).wait_stream(self._stream)

    def meet(self) -> None:
        """As `Window` says."""
        self._handle.barrier(channel=0, timeout_ms=1000 * TIMEOUT)

    def mark(self) -> Callable[[Sequence[Copy]], Callable[[], object]]:
        """As `Window` says."""
        ready = torch.cuda.current_stream(self._stream.device_index).record_event()

        def begin(copies: Sequence[Copy]) -> Callable[[], object]:
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                for out, x in copies:  # contiguous, of one dtype: a memcpy, not a kernel
                    out.copy_(x)
            done = self._stream.record_event()
            return lambda: torch.cuda.current_stream(self._stream.device_index).wait_event(done)

        return begin


class _Before:
    """The stream of the transfers before, of a group's windows."""

    stream: torch.cuda.Stream | None = None


def _allocate(memory: SymmetricMemory, capacity: int, device: torch.device) -> Tensor:
    """Symmetric memory, if need be what torch's allocator holds without use."""
    try:
        return memory.allocate(capacity, device)
    except RuntimeError:
        torch.cuda.empty_cache()
        return memory.allocate(capacity, device)


def _host() -> str:
    """What ranks of one host have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text() if boot.exists() else ''}"


_hosts: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def hosts(group: ProcessGroup) -> int:
    """How many hosts the group's ranks are on. At the first call all its ranks together."""
    if dist.get_world_size(group) == 1:
        return 1
    if group not in _hosts:
        _hosts[group] = len(set(_every(group, _host())))
    return _hosts[group]


def _works(window: SymmetricWindow) -> bool:
    """Whether copies from every rank give what it wrote, and what others write here is here."""
    window.buffers[window.rank][:GRAIN].fill_(window.rank + 1)
    window.meet()
    found = [torch.empty_like(buffer[:GRAIN]) for buffer in window.buffers]
    wait = window.mark()([(x, b[:GRAIN]) for x, b in zip(found, window.buffers, strict=True)])
    wait()
    same = all(bool((x == rank + 1).all()) for rank, x in enumerate(found))
    window.meet()
    for buffer in window.buffers:
        buffer[window.rank].fill_(255 - window.rank)
    window.meet()
    here = window.buffers[window.rank][: len(found)].tolist()
    window.meet()
    return same and here == [255 - rank for rank in range(len(found))]


def _try(group: ProcessGroup, device: torch.device) -> Staging | str:
    """Staging memory, or why a group has none. All its ranks together."""
    wrong = "this torch has no symmetric memory" if symmetric_memory() is None else None
    wrong = next((reason for reason in _every(group, wrong) if reason is not None), None)
    if wrong is None and hosts(group) > 1:
        wrong = "the ranks of the group are on several hosts"
    if wrong is not None:
        return wrong
    open_window = partial(_open, weakref.ref(group), torch.cuda.Stream(device), _Before())
    window = None
    try:
        window = open_window(GRAIN)
    except Exception as error:  # whatever a driver or a torch without it raises
        wrong = f"symmetric memory between the GPUs failed: {error}"
    wrong = next((reason for reason in _every(group, wrong) if reason is not None), None)
    if wrong is None and window is not None and not all(_every(group, _works(window))):
        wrong = "copies between the GPUs do not arrive"
    return Staging(open_window) if wrong is None else wrong


def _open(
    group: weakref.ref[ProcessGroup], stream: torch.cuda.Stream, before: _Before, capacity: int
) -> SymmetricWindow:
    """A window of a group; the cache of a group does not keep the group alive."""
    found = group()
    assert found is not None, "a call has the group"
    return SymmetricWindow(found, stream, before, capacity)


def _staging(group: ProcessGroup, device: torch.device) -> Staging | str:
    """Staging memory of a group, or why it has none: found out once, by all its ranks together."""
    if device.type != "cuda":
        return f"copy engines are of GPUs, not of {device.type}"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    found = _found.get(group)
    if found is None:
        found = _found[group] = _try(group, device)
    return found


TRANSPORTS = ("auto", "collectives", "copy_engines")
"""The transports by name."""


def capacity(group: ProcessGroup) -> int:
    """Bytes that this rank holds for copies of the group's other ranks; 0 without them."""
    found = _found.get(group)
    return found.capacity if isinstance(found, Staging) else 0


def require(name: str, groups: Sequence[ProcessGroup], device: torch.device) -> None:
    """Return if all groups have the transport of this name. All their ranks together.

    Raises:
        ValueError: one has not; on every rank, with the reason.
    """
    if name == "copy_engines":
        for group in groups:
            if dist.get_world_size(group) == 1:
                continue
            reason = _staging(group, device)
            if not isinstance(reason, Staging):
                refuse("transport", "one that the group has", f"'copy_engines': {reason}")


def has_engines(name: str, group: ProcessGroup, device: torch.device) -> bool:
    """Whether transfers in the group are copies between GPUs. All its ranks together."""
    if name == "collectives" or dist.get_world_size(group) == 1:
        return False
    return isinstance(_staging(group, device), Staging)


def make(name: str, device: torch.device, group: ProcessGroup, shards: Sharding) -> Transport:
    """The transport of this name in a group, whose ranks have these rows."""
    if has_engines(name, group, device):
        staging = _staging(group, device)
        assert isinstance(staging, Staging)
        return CopyEngines(staging, shards, dist.get_rank(group))
    return Collectives(group, shards)
