"""Methods by name: what each cannot do, which one "auto" takes, and their making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.checks import refuse
from . import cost, plan, symmetric
from .gather import Gather
from .local import Options
from .plan import Mask
from .ring import Ring
from .sharding import Sharding, joined, sharding
from .transport import Transport
from .ulysses import Core, Ulysses, key_head_copies


@dataclass(frozen=True)
class Groups:
    """The groups of this rank: across, and within for two levels."""

    across: ProcessGroup
    within: ProcessGroup | None = None

    @cached_property
    def across_size(self) -> int:
        """Ranks of `across`."""
        return dist.get_world_size(self.across)

    @cached_property
    def within_size(self) -> int:
        """Ranks of `within`."""
        return 1 if self.within is None else dist.get_world_size(self.within)

    @property
    def ranks(self) -> int:
        """Of all that share the sequence."""
        return self.across_size * self.within_size

    @cached_property
    def rank(self) -> int:
        """This one, from 0 to ranks - 1."""
        within = 0 if self.within is None else dist.get_rank(self.within)
        return dist.get_rank(self.across) * self.within_size + within

    @property
    def last_first(self) -> tuple[ProcessGroup, ...]:
        """The groups, that of the last dimension of the mesh first."""
        return (self.across,) if self.within is None else (self.within, self.across)


def unsupported_reason(
    method: str,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    shards: Sharding,
    mask: Mask,
    options: Options,
) -> str | None:
    """Why a method does not run this call, or None. The same on every rank.

    Args:
        method: by name.
        groups, shards: of the call.
        q, k: only their numbers of heads count.
        mask, options: of the call.
    """
    if method not in cost.METHODS:
        names = " or ".join(map(repr, ("auto", *cost.METHODS)))
        return f"method must be {names}, got {method!r}"
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    two_levels = groups.within is not None
    if method == "ulysses" and two_levels:
        return (
            "method must be 'all_gather' or 'ring' on a mesh of two dimensions, whose last one has"
            " Ulysses already, got 'ulysses'"
        )
    parted = groups.within_size if two_levels else groups.ranks
    if (two_levels or method == "ulysses") and not key_head_copies(heads_q, heads_k, parted):
        return (
            f"Ulysses divides the heads over {parted} ranks: their number must divide q's heads,"
            f" and divide k's heads or be a multiple of them, got {heads_q} and {heads_k}"
        )
    if "alibi_slopes" in options and method != "ulysses":
        outer = outer_of(groups, shards)
        ranks = range(outer.ranks)
        if method == "all_gather":
            calls = [call for r in ranks for call in plan.gathered(outer, r, mask)]
        else:
            calls = [c for r in ranks for s in ranks for c in plan.step(outer, r, s, mask)]
        if not all(call.aligned for call in calls):
            others = "'ulysses', or 'all_gather' with causal" if method == "ring" else "'ulysses'"
            return (
                f"alibi_slopes need method {others} here: with {method!r} a rank's queries meet"
                " keys at distances that the local call does not know"
            )
    return None


def outer_of(groups: Groups, shards: Sharding) -> Sharding:
    """The rows of the groups across, where `shards` has those of every rank."""
    if groups.within is None:
        return shards
    size = groups.within_size
    return Sharding(
        shards.rows,
        tuple(
            tuple(joined([x for spans in shards.spans[i : i + size] for x in spans]))
            for i in range(0, shards.ranks, size)
        ),
    )


@lru_cache(maxsize=256)
def work(shards: Sharding, mask: Mask) -> dict[str, Any]:
    """What `cost.Call` says of the visible pairs and of how ranks share them."""
    pairs = plan.visible_pairs(shards, mask)
    steps = shards.ranks - 1
    # One step stands for all, which take long to find.
    ring_step = plan.step(shards, steps, 0, mask) if steps else ()
    return {
        "share": sum(pairs) / max(shards.rows**2, 1),
        "balance": shards.ranks * max(pairs) / max(sum(pairs), 1),
        "ring_kernels": steps * len(ring_step),
    }


def call_of(
    groups: Groups, q: Tensor, k: Tensor, v: Tensor, shards: Sharding, mask: Mask
) -> cost.Call:
    """The sizes for the cost model: of the ranks across, where there are two levels."""
    within = groups.within_size
    outer = outer_of(groups, shards)
    return cost.Call(
        batch=q.shape[0],
        rows=shards.rows,
        heads_q=q.shape[2] // within,
        heads_k=max(1, k.shape[2] // within),
        dim=q.shape[3],
        dim_v=v.shape[3],
        ranks=outer.ranks,
        bytes=q.element_size(),
        **work(outer, mask),
    )


def choose_method(
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Sharding,
    mask: Mask,
    options: Options,
    transport: str = "auto",
) -> str:
    """The method of "auto": by `cost`, of those that run the call.

    Raises:
        ValueError: none does; the message has the reasons.
    """
    reasons = {m: unsupported_reason(m, groups, q, k, shards, mask, options) for m in cost.METHODS}
    allowed = tuple(method for method, reason in reasons.items() if reason is None)
    if not allowed:
        refuse("method", "one that runs this call", "; ".join(map(str, reasons.values())))
    call = call_of(groups, q, k, v, shards, mask)
    engines = symmetric.has_engines(transport, groups.across, q.device)
    return cost.choose(call, machine_of(q.device, groups.across, engines), allowed)


def machine_of(device: torch.device, group: ProcessGroup, engines: bool) -> cost.Machine:
    """The machine of a group, whose ranks all call this."""
    hosts = 1 if engines or device.type == "cpu" else symmetric.hosts(group)
    return cost.machine_of(device, hosts, engines)


MakeTransport = Callable[[ProcessGroup, Sharding], Transport]
"""From a group, and the rows of each of its ranks, to what moves rows in it."""


def build(
    method: str,
    groups: Groups,
    shards: Sharding,
    mask: Mask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: MakeTransport | None = None,
) -> Core:
    """The method for this rank.

    Args:
        method: by name, one that runs the call.
        groups, shards: of the call.
        mask: of the whole sequence.
        q, k, v: this rank's rows.
        transport: what moves rows; without, that of "auto" in each group.
    """
    make = partial(symmetric.make, "auto", q.device) if transport is None else transport
    call = call_of(groups, q, k, v, shards, mask)

    def machine(moves: Transport | None, group: ProcessGroup) -> cost.Machine:
        return machine_of(q.device, group, moves is not None and not moves.needs_sms)

    def exchanging(group: ProcessGroup, shards: Sharding, inner: Core, call: cost.Call) -> Core:
        exchange = make(group, shards)
        ratio = cost.ulysses_ratio(call, machine(exchange, group))
        return _ulysses(exchange, inner, q, k, ratio)

    if method == "ulysses":
        whole = sharding(shards.rows, 1, "contiguous")
        inner: Core = Gather(None, plan.gathered(whole, 0, mask))
        return exchanging(groups.across, shards, inner, call)
    outer = outer_of(groups, shards)
    rank = dist.get_rank(groups.across)
    if method == "ring":
        core: Core = Ring(make(groups.across, outer), outer, mask)
    else:
        across = make(groups.across, outer) if outer.ranks > 1 else None
        ratio = cost.gathering_ratio(call, machine(across, groups.across))
        core = Gather(across, plan.gathered(outer, rank, mask), ratio)
    if groups.within is None:
        return core
    rows = sharding(outer.lengths[rank], groups.within_size, "contiguous")
    call = replace(call, heads_q=q.shape[2], heads_k=k.shape[2], ranks=groups.within_size)
    return exchanging(groups.within, rows, core, call)


def _ulysses(transport: Transport, inner: Core, q: Tensor, k: Tensor, ratio: float) -> Ulysses:
    copies = key_head_copies(q.shape[2], k.shape[2], transport.ranks)
    assert copies is not None, "unsupported_reason says when"
    pieces = cost.pieces_of(k.shape[2] * copies // transport.ranks, ratio)
    return Ulysses(transport, inner, copies, pieces)
