"""Which method is fastest: a model of a call's time from its sizes and the ranks' links.

    time = kernels and their tails + what they do not hide of the transfers + passes over memory

For n ranks, S rows in all, Hq and Hk heads, head dims D and Dv, and b bytes an element, a rank
receives in a forward pass

    all_gather  (n - 1) / n · S Hk (D + Dv) b, in pieces of heads; the first piece is not hidden,
                and of the others what takes longer than the kernels
    ring        (n - 1) / n · S Hk (D + Dv) b, in n - 1 steps, each hidden by its kernels, whose
                last tiles leave SMs idle; what the steps give is added up, a few at a time
    ulysses     (n - 1) / n² · S (Hq (D + Dv) + Hk (D + Dv)) b, in pieces of heads; the first one in
                and the last one out are not hidden

The backward pass moves K and V again (ulysses: dO) and the gradients. Kernels take
4 S² Hq (D + Dv) / 2 · share FLOP in all, 2.5 times that backward, where `share` is that of visible
pairs. Numbers of a machine are a `Machine`; H200 was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rows import AT_ONCE

METHODS = ("all_gather", "ring", "ulysses")
"""The methods by name."""

SMALLEST_PIECE = 1 / 8
"""Of the heads: with fewer a piece's kernels no longer fill the GPU."""


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


ONE_HOST = Machine()
"""Ranks that NVLink connects, with collectives of NCCL."""

ENGINES = Machine(link=399e9, latency=12e-6)
"""The same ranks, with copies by copy engines.

Seen once between two H200s, in a run that left no result file (docs/notes/020): a copy of 29.4 MB
takes 77.5 us and one of 4.2 MB 14.4 us, so 3.9 us and then 399 GB/s; a barrier takes 4 us. A
transfer is a barrier and the beginnings of two copies, of a zigzag's two spans.

Where your links differ, assign a Machine of your own here, the same one on every rank:
`cost.ENGINES = dataclasses.replace(cost.ENGINES, link=350e9)`."""

MANY_HOSTS = Machine(link=45e9, latency=60e-6)
"""Ranks that a 400 Gbit/s network card each connects."""

CPU = Machine(forward=2e9, backward=2e9, memory=1e10, link=1e9, latency=1e-3)
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

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        return self.kernels + self.exposed + self.memory

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.kernels + other.kernels,
            self.exposed + other.exposed,
            self.memory + other.memory,
        )


def pieces_of(heads: int, ratio: float, returns: bool = True) -> tuple[int, ...]:
    """How many of the key heads are in each piece that travels.

    The first piece is small, since no kernel hides its way in, and so is the last one if results
    travel back, since no kernel hides its way out. Each other one is as large as the kernels of the
    one before can hide.

    Args:
        heads: in all.
        ratio: the time of the kernels over that of the transfers.
        returns: whether something travels back.
    """
    unit = max(1, round(heads * SMALLEST_PIECE))
    if heads <= unit:
        return (heads,)
    last = unit if returns and heads > 2 * unit else 0
    pieces = [unit]
    while (left := heads - last - sum(pieces)) > 0:
        pieces.append(min(left, max(unit, int(pieces[-1] * ratio))))
    return (*pieces, last) if last else tuple(pieces)


def gathering_ratio(call: Call, machine: Machine) -> float:
    """The time of the kernels over that of the transfers in all_gather, forward."""
    keys = 2.0 * call.heads_q / call.heads_k * call.rows * call.share  # FLOP for an element of K
    ways = max(1, call.ranks - 1) * call.bytes
    return keys / machine.forward / (ways / machine.link)


def ulysses_ratio(call: Call, machine: Machine) -> float:
    """The same of ulysses."""
    key_heads = max(call.heads_k, call.ranks)
    keys = 2.0 * call.heads_q / (call.heads_q + key_heads) * call.rows * call.share
    ways = max(1, call.ranks - 1) * call.bytes / call.ranks
    return keys / machine.forward / (ways / machine.link)


def _pipelined(kernels: float, travel: float, pieces: tuple[int, ...], latency: float) -> float:
    """What is exposed of transfers in pieces, each of which travels while others are computed."""
    arrived = done = 0.0
    for piece in pieces:
        share = piece / sum(pieces)
        arrived += share * travel + latency
        done = max(done, arrived) + share * kernels
    return done - kernels


def _pass(method: str, call: Call, machine: Machine, backward: bool) -> Estimate:
    n, dims = call.ranks, call.dim + call.dim_v
    speed = machine.backward / 2.5 if backward else machine.forward
    flops = 2.0 * call.batch * call.heads_q * dims * call.rows**2 * call.share
    kernels = flops / n / speed
    if n == 1:
        return Estimate(kernels, 0.0, 0.0)
    rows = call.batch * call.rows / n  # of a rank
    kv = rows * call.heads_k * dims * call.bytes
    q_out = rows * call.heads_q * dims * call.bytes
    if method == "ulysses":
        per_rank = max(call.heads_k, n) // n
        pieces = pieces_of(per_rank, ulysses_ratio(call, machine))
        kv *= max(1.0, n / call.heads_k)
        travel = (n - 1) / n * (q_out + kv) / machine.link
        # In and out take turns on the links: half of each piece's transfers is before its kernel.
        exposed = _pipelined(kernels, travel, pieces, 2 * machine.latency)
        return Estimate(kernels, exposed, 4 * (q_out + kv) / machine.memory)
    kernels *= call.balance  # here a rank computes its own rows
    travel = (n - 1) * kv / machine.link
    if method == "all_gather":
        pieces = pieces_of(call.heads_k, gathering_ratio(call, machine), backward)
        exposed = _pipelined(kernels, travel, pieces, machine.latency)
        copies = 2 * n * kv
        if backward:  # and the sums, the last of which is not hidden
            exposed += _pipelined(kernels, travel, pieces, machine.latency)
            copies += 4 * n * kv
        return Estimate(kernels, exposed, (copies + 2 * q_out) / machine.memory)
    step = kv / machine.link + machine.latency
    kernel = kernels / n
    exposed = (n - 1) * max(0.0, step - kernel)
    # All rows in the first step, in the others of a zigzag all or half of them.
    results = 1 + 0.75 * (n - 1)
    rounds = max(0.0, results - AT_ONCE) / (AT_ONCE - 1)  # in float32
    passes = results + 1 + rounds * 8 / call.bytes
    copies = passes * rows * call.heads_q * call.dim_v * call.bytes
    tails = (n - 1 if call.ring_kernels is None else call.ring_kernels) * machine.tail
    if backward:
        exposed = (n - 1) * max(0.0, 2 * step - kernel) + step  # the last way home is not hidden
        copies *= call.dim / call.dim_v
        copies += (2 * (n - 1) + passes) * kv
        tails *= 2.5
    return Estimate(kernels + tails, exposed, copies / machine.memory)


def estimate(method: str, call: Call, machine: Machine) -> Estimate:
    """The model's time of a call, forward and, if the call has gradients, backward.

    Args:
        method: one of METHODS.
        call: the sizes.
        machine: the speeds.
    """
    found = _pass(method, call, machine, backward=False)
    return found + _pass(method, call, machine, backward=True) if call.gradients else found


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
