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
from .algorithms import Core, Gather, Ring, Ulysses, key_head_copies
from .local import Options
from .on_device import kept
from .packing import Mask
from .sharding import Sharding, sharding
from .transport import Transport


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
        """The groups, the one of the last dimension of the mesh first."""
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
    if "alibi_slopes" not in options or method == "ulysses":
        return None
    if _keeps_distances(method, outer_of(groups, shards), mask):
        return None
    others = "'ulysses', or 'all_gather' with causal" if method == "ring" else "'ulysses'"
    return (
        f"alibi_slopes need method {others} here: with {method!r} a rank's queries meet"
        " keys at distances that the local call does not know"
    )


@kept()
def _keeps_distances(method: str, shards: Sharding, mask: Mask) -> bool:
    """Whether local calls know how far keys are from queries, as ALiBi needs."""
    ranks = range(shards.ranks)
    if method == "ring":
        plans = (plan.step(shards, r, s, mask) for r in ranks for s in ranks)
    else:  # under a causal mask, always
        plans = (plan.gathered(shards, r, mask) for r in ranks if mask.right != 0)
    return all(call.aligned for calls in plans for call in calls)


def outer_of(groups: Groups, shards: Sharding) -> Sharding:
    """The rows of the groups across; `shards` has the rows of every rank."""
    if groups.within is None:
        return shards
    assert shards.outer is not None
    return shards.outer


@kept()
def work(shards: Sharding, mask: Mask) -> dict[str, Any]:
    """What `cost.Call` says of the visible pairs and of how ranks share them."""
    pairs = plan.visible_pairs(shards, mask)
    balance = shards.ranks * max(pairs) / max(sum(pairs), 1)
    return {"balance": balance} | sizes(shards, mask)


@kept()
def sizes(shards: Sharding, mask: Mask) -> dict[str, Any]:
    """What it says of them without a look at the ranks' pairs."""
    documents = len(mask.documents_of(shards.rows)) - 1
    parts = 2 * documents if shards.documents is not None else documents / shards.ranks
    share = plan.share(shards.rows, mask)
    return {"share": share, "documents": max(1, documents), "parts": max(1, parts)}


@kept()
def ring_kernels(shards: Sharding, mask: Mask) -> int:
    """What `cost.Call` says of a ring. One step stands for all, which take long to find."""
    steps = shards.ranks - 1
    return steps and steps * plan.calls_in_a_step(shards, mask)


def call_of(
    groups: Groups, q: Tensor, k: Tensor, v: Tensor, rows: int, facts: dict[str, Any]
) -> cost.Call:
    """The sizes for the cost model: of the ranks across, if there are two levels. `facts`: the
    visible pairs."""
    within = groups.within_size
    return cost.Call(
        batch=q.shape[0],
        rows=rows,
        heads_q=q.shape[2] // within,
        heads_k=max(1, k.shape[2] // within),
        dim=q.shape[3],
        dim_v=v.shape[3],
        ranks=groups.across_size,
        bytes=q.element_size(),
        **facts,
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
    outer = outer_of(groups, shards)
    # To two digits, which is more than the model knows: like packings share its answers.
    facts = {name: float(f"{x:.2g}") for name, x in work(outer, mask).items()}
    call = call_of(groups, q, k, v, shards.rows, facts | {"ring_kernels": 0})
    engines = symmetric.has_engines(transport, groups.across, q.device)
    machine = machine_of(q.device, groups.across, engines)
    method = cost.choose(call, machine, allowed)
    if method != "ring":  # whose kernels need not be counted, then
        return method
    call = replace(call, ring_kernels=ring_kernels(outer, mask))
    return cost.choose(call, machine, allowed)


def machine_of(device: torch.device, group: ProcessGroup, engines: bool) -> cost.Machine:
    """The machine of a group, whose ranks all call this."""
    hosts = 1 if engines or device.type == "cpu" else symmetric.hosts(group)
    return cost.machine_of(device, hosts, engines)


MakeTransport = Callable[[ProcessGroup, Sharding], Transport]
"""From a group, and the rows of each of its ranks, to what moves rows in it."""

Sized = tuple[cost.Call, cost.Machine]


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
        transport: what moves rows; without, the one of "auto" in each group.
    """
    make = partial(symmetric.make, "auto", q.device) if transport is None else transport
    outer = outer_of(groups, shards)
    rank = dist.get_rank(groups.across)

    def sized(moves: Transport | None, group: ProcessGroup, **changed: Any) -> Sized:
        call = replace(call_of(groups, q, k, v, shards.rows, sizes(outer, mask)), **changed)
        engines = moves is not None and not moves.needs_sms
        return call, machine_of(q.device, group, engines)

    if method == "ulysses":
        whole = sharding(shards.rows, 1, "contiguous")
        exchange = make(groups.across, shards)
        inner = Gather(None, plan.gathered(whole, 0, mask))
        return _ulysses(exchange, inner, q, k, *sized(exchange, groups.across))
    if method == "ring":
        core: Core = Ring(make(groups.across, outer), outer, mask)
    else:
        across = make(groups.across, outer) if outer.ranks > 1 else None
        calls = plan.gathered(outer, rank, mask)
        core = Gather(across, calls, partial(_pieces, *sized(across, groups.across)))
    if groups.within is None:
        return core
    exchange = make(groups.within, sharding(outer.lengths[rank], groups.within_size, "contiguous"))
    all_heads = {"heads_q": q.shape[2], "heads_k": k.shape[2], "ranks": groups.within_size}
    return _ulysses(exchange, core, q, k, *sized(exchange, groups.within, **all_heads))


@lru_cache(maxsize=64)
def _pieces(call: cost.Call, machine: cost.Machine, heads: int, backward: bool) -> tuple[int, ...]:
    """Key heads in each piece of an all-gather, of `heads`."""
    return cost.gathering(call, machine, backward).pieces(heads, returns=backward)


@lru_cache(maxsize=64)
def _exchanged(call: cost.Call, machine: cost.Machine, heads: int) -> tuple[int, ...]:
    """The same of Ulysses, whose pieces serve both passes."""
    return cost.exchanging(call, machine).pieces(heads, returns=True)


def _ulysses(
    transport: Transport, inner: Core, q: Tensor, k: Tensor, call: cost.Call, machine: cost.Machine
) -> Ulysses:
    copies = key_head_copies(q.shape[2], k.shape[2], transport.ranks)
    assert copies is not None, "unsupported_reason says when"
    heads = k.shape[2] * copies // transport.ranks
    return Ulysses(transport, inner, copies, _exchanged(call, machine, heads))
