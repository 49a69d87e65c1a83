"""Which method is fastest: a model of a call's time from its sizes and the ranks' links.

    time = kernels and their tails + what they do not hide of the transfers + passes over memory

For n ranks, S rows in all, Hq and Hk heads, head dims D and Dv, and b bytes an element, a rank
receives in a forward pass

    all_gather  (n - 1) / n · S Hk (D + Dv) b, in pieces of heads; the first piece is not hidden,
                and of the others the excess over the kernels
    ring        (n - 1) / n · S Hk (D + Dv) b, in n - 1 steps, each hidden by its kernels, whose
                last tiles leave SMs idle; what the steps give is added up, a few at a time
    ulysses     (n - 1) / n² · S (Hq (D + Dv) + Hk (D + Dv)) b, in pieces of heads; the first one in
                and the last one out are not hidden

The backward pass moves K and V again (ulysses: dO) and the gradients. Kernels take
4 S² Hq (D + Dv) / 2 · share FLOP in all, 2.5 times that backward (`share`: of visible pairs);
and not less than a tile for every head of every document, however short. A pass takes no
less time than its host needs to enqueue its pieces or steps. Numbers of a machine are a `Machine`;
H200 was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .transport import AT_ONCE

METHODS = ("all_gather", "ring", "ulysses")
"""The methods by name."""

SMALLEST_PIECE = 1 / 8
"""Of the heads: with fewer a piece's kernels no longer fill the GPU."""

LARGER_PIECES = (1 / 4, 1 / 2, 1.0)
"""The same for a host that would be late with such pieces."""


TILE = 128
"""Rows of a tile of queries."""


@dataclass(frozen=True)
class Machine:
    """Speeds of a device and of its links."""

    forward: float = 700e12
    """FLOP/s of the forward kernels; causal, head dim 128, an H200's fa3."""

    backward: float = 600e12
    """FLOP/s of the backward kernels."""

    memory: float = 4.0e12
    """Bytes/s of the device's memory."""

    link: float = 290e9
    """Bytes/s that a rank receives from all others: an H200 of one host, NCCL, 128 to 512 MB."""

    latency: float = 25e-6
    """Seconds until a transfer moves: one collective of NCCL in one host."""

    tail: float = 40e-6
    """Seconds that a forward kernel's last tiles leave SMs idle, 2.5 times that backward."""

    tile: float = 45e-9
    """Seconds of the whole device for TILE rows of one query head that see few keys, twice that
    backward. Two H200s, 1,000 documents of 131 rows in the mean, 32 heads: 45 ns forward and 76
    backward of parts of 33 rows, 44 and 113 of whole documents."""

    host: float = 0.5e-3
    """Seconds until the host has enqueued a piece of an all-gather or a step of a ring; twice as
    long for ulysses, whose results travel back; 2.5 times as long backward. An estimate: hosts of
    H200s took 0.5 to 0.75 ms with more views and look-ups than a piece has now, for ulysses 1.0 to
    1.1."""


ONE_HOST = Machine()
"""Ranks that NVLink connects, with collectives of NCCL."""

ENGINES = Machine(link=399e9, latency=12e-6)
"""The same ranks, with copies by copy engines.

Seen once between two H200s, in a run that left no result file (docs/notes/020): a copy of 29.4 MB
costs 77.5 us and one of 4.2 MB 14.4 us, so 3.9 us and then 399 GB/s; a barrier costs 4 us. A
transfer is a barrier and the beginnings of two copies, of a zigzag's two spans.

Where your links differ, assign a Machine of your own here, the same one on every rank:
`cost.ENGINES = dataclasses.replace(cost.ENGINES, link=350e9)`."""

MANY_HOSTS = Machine(link=45e9, latency=60e-6)
"""Ranks that a 400 Gbit/s network card each connects."""

CPU = Machine(forward=2e9, backward=2e9, memory=1e10, link=1e9, latency=1e-3, tile=0, host=0)
"""gloo between processes of one machine, with the CPU kernels: for tests."""


@dataclass(frozen=True)
class Call:
    """The sizes that decide."""

    batch: int
    rows: int
    """S, of the whole sequence."""

    heads_q: int
    heads_k: int
    dim: int
    dim_v: int
    ranks: int
    bytes: int = 2
    """Of an element."""

    share: float = 1.0
    """Of the pairs of the whole sequence, those that are visible: 1 / 2 when causal."""

    balance: float = 1.0
    """The visible pairs of the busiest rank's rows over the mean: 1 for a zigzag of one causal
    sequence. The ranks of ulysses share the heads, and so have the same work."""

    documents: float = 1.0
    """Packed sequences; 1 without."""

    parts: float = 1.0
    """Parts of documents that a rank has rows of, the mean over the ranks."""

    ring_kernels: int | None = None
    """Calls in a ring's steps after the first; None: one in each, and documents need more."""

    gradients: bool = True
    """Whether a backward pass follows."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one pass on the busiest rank."""

    kernels: float
    """Their tails included."""

    exposed: float
    """Transfers that no kernel hides."""

    memory: float
    """Packing, merging and converting."""

    host: float = 0.0
    """What the host needs to enqueue it all."""

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        return max(self.kernels + self.exposed + self.memory, self.host)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.kernels + other.kernels,
            self.exposed + other.exposed,
            self.memory + other.memory,
            self.host + other.host,
        )


def pieces_of(
    heads: int, ratio: float, returns: bool = True, smallest: float = SMALLEST_PIECE
) -> tuple[int, ...]:
    """How many of the key heads are in each piece that travels.

    The first piece is small, since no kernel hides its way in, and so is the last one if results
    travel back, since no kernel hides its way out. Each other one is as large as the kernels of the
    one before can hide.

    Args:
        heads: in all.
        ratio: the time of the kernels over the time of the transfers.
        returns: whether something travels back.
        smallest: the number of heads in the first and the last piece.
    """
    unit = max(1, round(heads * smallest))
    if heads <= unit:
        return (heads,)
    last = unit if returns and heads > 2 * unit else 0
    pieces = [unit]
    while (left := heads - last - sum(pieces)) > 0:
        pieces.append(min(left, max(unit, int(pieces[-1] * ratio))))
    return (*pieces, last) if last else tuple(pieces)


@dataclass(frozen=True)
class Flow:
    """What decides in how many pieces the key heads of a pass travel: seconds of all of them."""

    heads: int
    kernels: float
    travel: float
    """Of what comes before a kernel; as much may follow it."""

    latency: float
    host: float
    """Of a piece."""

    ratio: float
    """The time of the kernels over the time of the transfers, forward."""

    ways: int = 1
    """How often as much travels, each hidden by the kernels."""

    def exposed(self, pieces: tuple[int, ...]) -> float:
        """Seconds of transfers in such pieces that no kernel hides."""
        share = sum(pieces) / self.heads
        arrived = done = 0.0
        for piece in pieces:
            arrived += piece / self.heads * self.travel + self.latency
            done = max(done, arrived) + piece / self.heads * self.kernels
        return self.ways * (done - share * self.kernels)

    def pieces(self, heads: int, returns: bool) -> tuple[int, ...]:
        """How many of these key heads are in each piece: as `pieces_of` says, if the host
        enqueues these in time. Otherwise in fewer and larger pieces, if that is faster."""

        def seconds(pieces: tuple[int, ...]) -> tuple[bool, float]:
            device = heads / self.heads * self.kernels + self.exposed(pieces)
            enqueued = self.host * len(pieces)
            return enqueued > device, max(device, enqueued)

        pieces = pieces_of(heads, self.ratio, returns)
        late, _ = seconds(pieces)
        if not late:
            return pieces
        larger = (pieces_of(heads, self.ratio, returns, x) for x in LARGER_PIECES)
        return min((pieces, *larger), key=lambda x: seconds(x)[1])


def _kernels(call: Call, machine: Machine, sequences: float, backward: bool) -> float:
    """Seconds of a rank's kernels if all have the same work, which is in `sequences` sequences of
    all query heads: by their FLOP, or by their tiles, of which each sequence has one at least."""
    flops = 2.0 * call.batch * call.heads_q * (call.dim + call.dim_v) * call.rows**2 * call.share
    speed = machine.backward / 2.5 if backward else machine.forward
    tiles = max(sequences, sequences / 2 + call.rows / call.ranks / TILE)
    tiles *= call.batch * call.heads_q * machine.tile * (2.0 if backward else 1.0)
    return max(flops / call.ranks / speed, tiles)


def _bytes(call: Call) -> tuple[float, float]:
    """Of a rank's rows: q and out, and K and V."""
    elements = call.batch * call.rows / call.ranks * (call.dim + call.dim_v)
    return elements * call.heads_q * call.bytes, elements * call.heads_k * call.bytes


def gathering(call: Call, machine: Machine, backward: bool = False) -> Flow:
    """Of all_gather: K and V, and backward the sums of their gradients as well."""
    _, kv = _bytes(call)
    travel = max(1, call.ranks - 1) * kv / machine.link
    forward = _kernels(call, machine, call.parts, backward=False)
    kernels = _kernels(call, machine, call.parts, backward)
    host = machine.host * (2.5 if backward else 1.0)
    return Flow(
        call.heads_k, kernels, travel, machine.latency, host, forward / travel, 1 + backward
    )


def exchanging(call: Call, machine: Machine, backward: bool = False) -> Flow:
    """Of ulysses, whose ranks have heads of all rows. In and out take turns on the links: half of
    what a piece moves travels before its kernels."""
    n = call.ranks
    q_out, kv = _bytes(call)
    travel = max(1, n - 1) / n * (q_out + kv * max(1.0, n / call.heads_k)) / machine.link
    forward = _kernels(call, machine, call.documents / n, backward=False)
    kernels = _kernels(call, machine, call.documents / n, backward)
    host = 2 * machine.host * (2.5 if backward else 1.0)
    heads = max(call.heads_k, n) // n
    return Flow(heads, kernels, travel, 2 * machine.latency, host, forward / travel)


def _pass(method: str, call: Call, machine: Machine, backward: bool) -> Estimate:
    n = call.ranks
    if n == 1:
        return Estimate(_kernels(call, machine, call.parts, backward), 0.0, 0.0)
    q_out, kv = _bytes(call)
    if method == "ulysses":
        flow = exchanging(call, machine, backward)
        pieces = exchanging(call, machine).pieces(flow.heads, returns=True)
        kv *= max(1.0, n / call.heads_k)
        exposed, host = flow.exposed(pieces), flow.host * len(pieces)
        return Estimate(flow.kernels, exposed, 4 * (q_out + kv) / machine.memory, host)
    if method == "all_gather":
        flow = gathering(call, machine, backward)
        pieces = flow.pieces(call.heads_k, backward)
        copies = (6 if backward else 2) * n * kv  # backward, the sums too
        kernels = flow.kernels * call.balance  # here a rank computes its own rows
        slower = replace(flow, kernels=kernels)
        memory = (copies + 2 * q_out) / machine.memory
        return Estimate(kernels, slower.exposed(pieces), memory, flow.host * len(pieces))
    kernels = _kernels(call, machine, n * call.parts, backward) * call.balance
    step = kv / machine.link + machine.latency
    kernel = kernels / n
    exposed = (n - 1) * max(0.0, step - kernel)
    # All rows in the first step, in the others of a zigzag all or half of them.
    results = 1 + 0.75 * (n - 1)
    rounds = max(0.0, results - AT_ONCE) / (AT_ONCE - 1)  # in float32
    passes = results + 1 + rounds * 8 / call.bytes
    rows = call.batch * call.rows / n  # of a rank
    copies = passes * rows * call.heads_q * call.dim_v * call.bytes
    tails = (n - 1 if call.ring_kernels is None else call.ring_kernels) * machine.tail
    host = n * machine.host
    if backward:
        exposed = (n - 1) * max(0.0, 2 * step - kernel) + step  # the last way home is not hidden
        copies *= call.dim / call.dim_v
        copies += (2 * (n - 1) + passes) * kv
        tails, host = 2.5 * tails, 2.5 * host
    return Estimate(kernels + tails, exposed, copies / machine.memory, host)


def estimate(method: str, call: Call, machine: Machine) -> Estimate:
    """The model's time of a call, forward and, if the call has gradients, backward.

    Args:
        method: one of METHODS.
        call: the sizes.
        machine: the speeds.
    """
    found = _pass(method, call, machine, backward=False)
    return found + _pass(method, call, machine, backward=True) if call.gradients else found


@lru_cache(maxsize=64)
def choose(call: Call, machine: Machine, allowed: tuple[str, ...] = METHODS) -> str:
    """The method of the shortest time, of those allowed; the first of equal ones."""
    return min(allowed, key=lambda method: estimate(method, call, machine).total)


def machine_of(device: torch.device, hosts: int, engines: bool = False) -> Machine:
    """The machine of a group of ranks. The arguments are the same on every rank, so all choose
    alike.

    Args:
        device: of the tensors.
        hosts: how many hosts the group's ranks are on (`symmetric.hosts`).
        engines: transfers are copies by copy engines, on one host.
    """
    if device.type == "cpu":
        return CPU
    if engines:
        return ENGINES
    return ONE_HOST if hosts == 1 else MANY_HOSTS
