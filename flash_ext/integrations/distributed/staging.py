"""Memory that other ranks read and write, and when it may be written again.

Most transfers pull: every rank writes what the others want into a region of its own memory, all
ranks meet, and then each copies from the regions of the others. Some push: every rank writes into
the regions of all, and once they have met each reads its own. All ranks do the same in the same
order, so their regions have the same places, and nobody tells anybody where.

A region may be written again, by any rank, when no rank reads it any more. What a rank knows of
others it knows by barriers: each lets its stream wait for its pulls of a region, and enqueues what
reads its own, before a later barrier; so after that barrier all of it is done. Hence

    1. a region is closed once this rank's stream waits for its pulls (and nothing enqueued after
       the next barrier reads this rank's own part), at the same call on every rank;
    2. it is free once a barrier was enqueued after it was closed. `take` may enqueue one.

Every transfer has a barrier of its own, so a free region costs none: a forward pass uses two
regions in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

ALIGNMENT = 256
"""Of regions and of the blocks in them, in bytes."""

GRAIN = 1 << 21
"""Memory is taken in multiples of so many bytes, the driver's pages."""

LARGE = 1 << 30
"""Bytes from which an extra barrier is cheaper than more memory: it frees what is closed."""

Copy = tuple[Tensor, Tensor]
"""Where to and where from: contiguous, of one shape and dtype."""


class Window(Protocol):
    """Memory of all ranks that this rank can read and write."""

    rank: int
    buffers: Sequence[Tensor]
    """Of every rank, uint8 (capacity)."""

    def follow(self) -> None:
        """What the current stream does next comes after all that earlier transfers enqueued."""

    def drain(self) -> None:
        """The current stream waits for all pulls that were begun."""

    def meet(self) -> None:
        """A barrier, enqueued on the current stream: what the ranks enqueued before it is done, and
        seen by all, when what they enqueue after it begins."""

    def mark(self) -> Callable[[Sequence[Copy]], Callable[[], object]]:
        """A function that begins copies, once what is now enqueued on the current stream is done,
        and returns their wait: of the stream that is then the current one."""


@dataclass
class Region:
    """Bytes [first, last) of a window on every rank, of one transfer."""

    window: Window
    first: int
    last: int
    closed: int | None = None
    """How many barriers had been enqueued when it was closed."""

    kept: list[object] = field(default_factory=list)
    """Where pulls write: alive until they are done, even if nobody waits."""


class Staging:
    """The regions of one group of ranks."""

    def __init__(self, open_window: Callable[[int], Window]) -> None:
        """`open_window` makes a window of so many bytes; all ranks call it together."""
        self._open = open_window
        self._window: Window | None = None
        self._capacity = 0
        self._met = 0
        self._regions: list[Region] = []  # of the window that are not known to be free, in order

    @property
    def capacity(self) -> int:
        """Bytes that this rank holds for others."""
        return self._capacity

    def take(self, size: int) -> Region:
        """A region of so many bytes, which this rank may write from now on."""
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        if self._window is not None:
            self._window.follow()
        self._forget_free()
        place = self._place(size)
        if place is None and self._window is not None and self._capacity + size > LARGE:
            self.meet(self._window)
            self._forget_free()
            place = self._place(size)
        if place is None:
            self._grow(size)
            place = 0
        assert self._window is not None
        region = Region(self._window, place, place + size)
        self._regions = sorted([*self._regions, region], key=lambda region: region.first)
        return region

    def _grow(self, size: int) -> None:
        """A new window, empty, with so many bytes more. Open regions keep the old one.

        Every window costs all ranks a while: so memory is doubled as long as it is small.
        """
        more = size if self._capacity + size > LARGE else max(size, self._capacity)
        capacity = -(-(self._capacity + more) // GRAIN) * GRAIN
        if capacity > LARGE and all(region.closed is not None for region in self._regions):
            self._window, self._capacity = None, 0  # there may not be memory for both
            self._regions = []
        self._window = self._open(capacity)
        self._window.follow()
        self._capacity, self._regions = capacity, []

    def meet(self, window: Window) -> None:
        """Enqueue a barrier."""
        window.meet()
        self._met += 1

    def close(self, region: Region) -> None:
        """The current stream waits for this rank's pulls of the region."""
        region.closed = self._met
        region.kept.clear()

    def abandon(self) -> None:
        """A new call begins: what an earlier one, which raised, left open is closed."""
        for region in self._regions:
            if region.closed is None:
                region.window.drain()
                self.close(region)

    def _forget_free(self) -> None:
        self._regions = [
            region
            for region in self._regions
            if region.closed is None or region.closed >= self._met
        ]

    def _place(self, size: int) -> int | None:
        """The first gap that is long enough."""
        at = 0
        for region in self._regions:
            if region.first - at >= size:
                return at
            at = region.last
        return at if at + size <= self._capacity else None
