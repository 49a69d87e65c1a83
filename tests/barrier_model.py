"""Can the threads of a kernel wait for each other for ever, or access shared memory too early?

In any order in which they may run.

A kernel's threads are lists of events (tests/native/fake_cuda/device.h). `Run` runs them once, in
some order. For each event it knows which events of other threads surely come before it, since its
thread has waited for them, directly or not (vector clocks). So one order stands for all of them if

- an arrival comes after all arrivals of the phase before: it counts in the same phase in any order;
- a wait comes after all arrivals of the phase before the awaited one: since a barrier only has a
  parity, the wait could otherwise end too early;
- a phase ends after all waits for the phase before: they could otherwise wait for ever.

Then, in any order, each phase has the same arrivals and each event the same events before it, and
either all orders come to an end or none does. Accesses of the same bytes, one of which is a write,
must then be ordered, too. tests/test_barriers.py compares this with a search through all orders.

An access by TMA or wgmma lasts until its thread, or whoever sees the phase of its mbarrier, has
waited for it. What a thread has written itself they see only after its fence.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

from shared_memory import matmul_chunks

DEVICE = Path(__file__).resolve().parent / "native" / "fake_cuda" / "device.h"
Event = IntEnum("Event", re.findall(r"^    k(\w+),", DEVICE.read_text(), re.MULTILINE), start=0)
EVENTS = tuple(Event)
WRITES = (Event.Write, Event.Load, Event.Copy)
BY_PROXY = (Event.Load, Event.Store, Event.Matmul)
Noted = tuple[int, ...]
"""An event and its arguments."""
Clock = list[int]
"""How many events of each thread, and phases of TMA's writes through each mbarrier, came before."""
Moment = tuple[int, int]
"""A component of clocks, and its value."""


def seen(clock: Clock, moments: Iterable[Moment]) -> bool:
    return all(clock[component] >= time for component, time in moments)


class Bytes:
    """Some bytes of shared memory, from `begin` to `end`: those whose bit is set in `bits`."""

    def __init__(self, bits: int) -> None:
        self.begin = (bits & -bits).bit_length() - 1
        self.end = bits.bit_length()
        self.bits = bits >> self.begin

    def both(self, other: Bytes) -> int:
        """The bits of the bytes in both, from the later begin on."""
        if self.begin > other.begin:
            return other.both(self)
        if self.end <= other.begin:
            return 0
        return self.bits >> (other.begin - self.begin) & other.bits


@cache
def interval(address: int, size: int) -> Bytes:
    return Bytes((1 << size) - 1 << address)


@cache
def read_by_matmuls(matmuls: tuple[Noted, ...]) -> Bytes:
    """Of each: the descriptors of A and B, the columns of B, and which one is MN-major."""
    chunks: set[int] = set()
    for a, b, columns, a_mn_major, b_mn_major in matmuls:
        for descriptor, rows, mn_major in ((a, 64, a_mn_major), (b, columns, b_mn_major)):
            chunks |= matmul_chunks(descriptor, rows, bool(mn_major)) if descriptor else set()
    mask = bytearray(max(chunks) * 2 + 2)  # a bit for each byte
    for chunk in chunks:
        mask[chunk * 2 : chunk * 2 + 2] = b"\xff\xff"
    return Bytes(int.from_bytes(mask, "little"))


class Barrier:
    """An mbarrier or a named barrier."""

    def __init__(self, name: str, arrivals: int, component: int = -1) -> None:
        self.name = name
        self.arrivals = arrivals
        self.component = component  # of TMA's writes
        self.made: list[Moment] = []  # when it was initialized
        self.phase = 0  # the number of the one that is not complete
        self.missing = arrivals
        self.bytes = 0  # that TMA has still to bring
        self.clock: Clock = []
        self.clocks: list[Clock] = []  # of all phases before
        self.arrived: list[list[Moment]] = [[]]  # in each phase
        self.waited: list[Moment] = []  # for the phase before


@dataclass(slots=True)
class Access:
    thread: int
    event: Event
    burst: int  # of its thread: during one no other thread runs, and no access of TMA begins
    end: Moment | None = None
    fence: int | None = None  # when its thread has made it visible to TMA and wgmma

    def __str__(self) -> str:
        return f"{self.event.name} of {name_of(self.thread)}"


def name_of(thread: int) -> str:
    return f"warp {thread // 2} lane {thread % 2}"


class Thread:
    def __init__(self, index: int, weight: int, components: int, events: Iterable[Noted]) -> None:
        self.index = index
        self.weight = weight  # how many threads it stands for
        self.clock: Clock = [0] * components
        self.events = iter(events)
        self.next: Noted | None = None
        self.burst = 0
        self.arrived: tuple[Barrier, int] | None = None  # at a named barrier, in this phase
        self.tests: dict[int, Clock] = {}  # of mbarriers for which it has not waited yet
        self.unfenced: list[Access] = []
        self.matmuls: tuple[tuple[Noted, ...], Clock] = (), []  # of a group; when they began
        self.groups: dict[Event, list[list[Access]]] = defaultdict(lambda: [[]])

    @property
    def now(self) -> Moment:
        return self.index, self.clock[self.index]

    def join(self, clock: Clock) -> None:
        self.clock = list(map(max, self.clock, clock))
        self.burst += 1

    def complete_groups(self, event: Event, pending: int) -> None:
        groups = self.groups[event]
        first = max(len(groups) - pending, 0)
        for access in (x for group in groups[:first] for x in group):
            access.end = self.now
        self.groups[event] = groups[first:] or [[]]


class Memory:
    """The last accesses of each set of bytes that threads access together."""

    def __init__(self) -> None:
        self.last: dict[Bytes, dict[tuple[int, Event], Access]] = {}
        self.overlapping: dict[Bytes, list[Bytes]] = {}
        self.within: dict[Bytes, set[Bytes]] = {}

    def add(self, where: Bytes, access: Access) -> Iterator[tuple[Bytes, Access]]:
        """The accesses before this one that conflict with it, of each thread the last ones."""
        key = access.thread, access.event
        if where not in self.last:
            self.learn(where)
        before = self.last[where].get(key)
        if before is None or before.burst != access.burst:
            writes = access.event in WRITES
            for other in self.overlapping[where]:
                for x in self.last[other].values():
                    if writes or x.event in WRITES:
                        yield other, x
                if writes and other in self.within[where]:
                    self.last[other].clear()
        self.last[where][key] = access

    def learn(self, where: Bytes) -> None:
        self.last[where] = {}
        self.overlapping[where], self.within[where] = [], set()
        for x in self.last:
            if x.end <= where.begin or where.end <= x.begin or not (both := x.both(where)):
                continue
            self.overlapping[where].append(x)
            if x is not where:
                self.overlapping[x].append(where)
            for inner, outer in ((x, where), (where, x)):
                if inner.begin >= outer.begin and inner.bits == both:
                    self.within[outer].add(inner)


class Run:
    """A run of threads, in turn, each as far as it gets, and the faults that it shows.

    `barriers` are the names of mbarriers by address, `memory` (begin, end, name) of other shared
    memory. Unless there are `weights`, threads are lane 0 of a warp and lane 1, which stands for
    all its others. `until_fault`: a run may end with the first fault.
    """

    def __init__(
        self,
        threads: Sequence[Iterable[Noted]],
        barriers: dict[int, str],
        memory: Sequence[tuple[int, int, str]] = (),
        weights: Sequence[int] = (),
        until_fault: bool = False,
    ) -> None:
        self.barrier_names = barriers
        self.memory_names = memory
        components = len(threads) + len(barriers)
        self.threads = [
            Thread(i, weights[i] if weights else 31 if i % 2 else 1, components, events)
            for i, events in enumerate(threads)
        ]
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[tuple[str, int], Barrier] = {}
        self.memory = Memory()
        self.faults: dict[str, None] = {}
        self.noted: list[list[Noted]] = [[] for _ in threads]  # for other runs
        while any([self.advance(x) for x in self.threads if not (until_fault and self.faults)]):
            pass
        for thread in self.threads:
            if thread.next is not None:
                event, place = Event(thread.next[0]), thread.next[1]
                at = self.barrier_names.get(place, place)
                self.fault(f"{name_of(thread.index)} waits for ever: {event.name} {at}")
        for barrier in self.barriers.values():
            if barrier.bytes != 0:
                self.fault(f"{barrier.name}: {barrier.bytes} bytes too few")

    def fault(self, text: str) -> None:
        self.faults[text] = None

    def advance(self, thread: Thread) -> bool:
        """Runs a thread as far as it gets. Does it get anywhere?"""
        moved = False
        while True:
            if thread.next is None:
                thread.next = next(thread.events, None)
                if thread.next is None:
                    return moved
                self.noted[thread.index].append(thread.next)
                thread.clock[thread.index] += 1
            if not self.step(thread, EVENTS[thread.next[0]], thread.next[1:]):
                return moved
            thread.next = None
            moved = True

    def step(self, thread: Thread, event: Event, x: Noted) -> bool:
        """Returns False if the thread has to wait."""
        match event:
            case Event.Read | Event.Write:  # most of them
                self.access(thread, event, interval(x[0], x[1])).end = thread.now
            case Event.Init:
                component = len(self.threads) + len(self.barriers)
                self.barriers[x[0]] = Barrier(self.barrier_names[x[0]], x[1], component)
                self.barriers[x[0]].made.append(thread.now)
            case Event.Arrive:
                self.arrive(thread, self.barriers[x[0]], x[1])
            case Event.ArriveLate:
                self.arrive_late(thread, self.barriers[x[0]])
            case Event.Expect:
                self.barriers[x[0]].bytes += x[1]
                self.arrive(thread, self.barriers[x[0]])
            case Event.Test:
                thread.tests[x[0]] = list(thread.clock)
            case Event.Wait:
                return self.wait(thread, self.barriers[x[0]], x[0], x[1])
            case Event.Sync | Event.Signal:
                return self.sync(thread, ("barrier", x[0]), x[1], event == Event.Sync)
            case Event.WarpSync:
                return self.sync(thread, ("warp", thread.index // 2), 32, True)
            case Event.Load:
                self.load(thread, self.barriers[x[2]], x[0], x[1])
            case Event.Store | Event.Copy:
                access = self.access(thread, event, interval(x[0], x[1]))
                thread.groups[event][-1].append(access)
            case Event.Matmul:
                matmuls, began = thread.matmuls
                thread.matmuls = (*matmuls, x[:5]), began or list(thread.clock)
            case Event.Commit:
                matmuls, began = thread.matmuls
                access = self.access(thread, Event.Matmul, read_by_matmuls(matmuls), began)
                thread.groups[Event.Matmul][-1].append(access)
                thread.groups[Event.Matmul].append([])
                thread.matmuls = (), []
            case Event.CopyCommit:
                thread.groups[Event.Copy].append([])
            case Event.MatmulWait:
                thread.complete_groups(Event.Matmul, x[0] + 1)
            case Event.CopyWait:
                thread.complete_groups(Event.Copy, x[0] + 1)
            case Event.StoreWait:
                thread.complete_groups(Event.Store, 0)
            case Event.ProxyFence:
                for access in thread.unfenced:
                    access.fence = thread.now[1]
                thread.unfenced.clear()
        return True

    def arrive(self, thread: Thread, barrier: Barrier, times: int = 1) -> None:
        self.expect_fewer(barrier, thread.weight * times)
        self.count(barrier, thread.clock, thread.now)

    def arrive_late(self, thread: Thread, barrier: Barrier) -> None:
        """When the thread's copies are complete: in this run at once."""
        self.expect_fewer(barrier, thread.weight)
        for group in thread.groups[Event.Copy]:
            for access in group:
                access.end = barrier.component, barrier.phase + 1
            group.clear()
        self.count_later(thread, barrier)

    def expect_fewer(self, barrier: Barrier, arrivals: int) -> None:
        if arrivals > barrier.missing:
            self.fault(f"{barrier.name}: more arrivals than {barrier.arrivals}")
        barrier.missing -= arrivals

    def count_later(self, thread: Thread, barrier: Barrier) -> None:
        """Counts what the thread has begun and the barrier sees complete: in this run at once."""
        clock = list(thread.clock)
        clock[barrier.component] = barrier.phase + 1
        self.count(barrier, clock, (barrier.component, barrier.phase + 1))

    def count(self, barrier: Barrier, clock: Clock, now: Moment) -> None:
        """Counts an arrival, of a thread or of TMA's bytes."""
        if not seen(clock, barrier.made):
            self.fault(f"{barrier.name}: an arrival may come before it is initialized")
        if barrier.phase > 0 and not seen(clock, barrier.arrived[barrier.phase - 1]):
            self.fault(f"{barrier.name}: an arrival may count in the phase before")
        barrier.clock = list(map(max, barrier.clock, clock)) if barrier.clock else list(clock)
        barrier.arrived[-1].append(now)
        if barrier.missing > 0 or barrier.bytes != 0:
            return
        if not seen(barrier.clock, barrier.waited):
            self.fault(f"{barrier.name}: a phase may end before all have seen the one before")
        barrier.phase += 1
        barrier.missing = barrier.arrivals
        barrier.clocks.append(barrier.clock)
        barrier.clock = []
        barrier.arrived.append([])
        barrier.waited = []

    def wait(self, thread: Thread, barrier: Barrier, address: int, parity: int) -> bool:
        phase = barrier.phase - 1
        if phase % 2 != parity:
            return False
        clock = thread.tests.pop(address, thread.clock)
        if not seen(clock, barrier.made):
            self.fault(f"{barrier.name}: {name_of(thread.index)} may wait before it is initialized")
        if phase > 0 and not seen(clock, barrier.arrived[phase - 1]):
            self.fault(f"{barrier.name}: {name_of(thread.index)} may wait for too early a phase")
        if thread.weight == 1:  # the lanes of a warp see the end of a phase together
            barrier.waited.append(thread.now)
        if phase >= 0:
            thread.join(barrier.clocks[phase])
        return True

    def sync(self, thread: Thread, name: tuple[str, int], threads: int, waits: bool) -> bool:
        if thread.arrived is None:
            barrier = self.named.setdefault(name, Barrier(f"{name[0]} {name[1]}", threads))
            if barrier.arrivals != threads:
                self.fault(f"{barrier.name}: {threads} threads, or {barrier.arrivals}")
            thread.arrived = barrier, barrier.phase
            self.arrive(thread, barrier)
        barrier, phase = thread.arrived
        if waits and barrier.phase == phase:
            return False
        if waits:
            thread.join(barrier.clocks[phase])
        thread.arrived = None
        return True

    def load(self, thread: Thread, barrier: Barrier, address: int, size: int) -> None:
        """In this run the bytes are there at once."""
        now = barrier.component, barrier.phase + 1
        self.access(thread, Event.Load, interval(address, size)).end = now
        barrier.bytes -= size
        if barrier.bytes < 0:
            self.fault(f"{barrier.name}: {-barrier.bytes} bytes more than expected")
        self.count_later(thread, barrier)

    def access(
        self, thread: Thread, event: Event, where: Bytes, clock: Clock | None = None
    ) -> Access:
        clock = clock or thread.clock
        if event not in (Event.Read, Event.Write):
            thread.burst += 1
        access = Access(thread.index, event, thread.burst)
        for other_bytes, other in self.memory.add(where, access):
            if other.event == event == Event.Write and other.thread ^ 1 == thread.index:
                continue  # lanes of a warp: one instruction, of the same value
            if other.end is None or clock[other.end[0]] < other.end[1]:
                fault = "may not be complete"
            elif other.event == Event.Write and event in BY_PROXY and not fenced(other, clock):
                fault = "has no fence"
            else:
                continue
            place = self.place(max(where.begin, other_bytes.begin))
            self.fault(f"{place}: {other} {fault} before {access}")
        if event == Event.Write:
            thread.unfenced.append(access)
        return access

    def place(self, address: int) -> str:
        names = [name for begin, end, name in self.memory_names if begin <= address < end]
        return names[0] if names else str(address)


def fenced(access: Access, clock: Clock) -> bool:
    return access.fence is not None and clock[access.thread] >= access.fence
