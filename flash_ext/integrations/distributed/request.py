"""What a call asks for: its checks, the ranks' agreement on it, and the method that does it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ... import ops
from ...ops.checks import dtype_name, refuse, require_device
from ...ops.options import QK_8_BITS
from .algorithms import Core
from .local import Options
from .methods import Groups, build, choose_method, unsupported_reason
from .on_device import captures, moved, numbers
from .packing import Mask
from .sharding import Documents, Sharding, documents_of, sharding
from .symmetric import TRANSPORTS, make, require
from .transport import all_gather

# --------------------------------------------------------------------------- documents that differ
# Whether all ranks have the same documents, which no call waits to know.
#
# Ranks with different documents compute wrong results, and nothing else tells. So each rank has a
# digest of all that it was given, and once in many calls the ranks begin to exchange it: a
# collective of eight bytes beside the kernels. They look at it as many calls later, when it has
# long been there, so that all of them raise in the same call.

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
    arrived, watched.arrived = watched.arrived, _begin_exchange(group, watched.digest, device)
    if arrived is not None and len(set(arrived().tolist())) > 1:
        raise ValueError(
            "flash_ext: the ranks of the group must agree: cu_seqlens, or the number of rows, was"
            f" not the same on all of them in one of the last {2 * EVERY} calls with cu_seqlens;"
            " with FLASH_EXT_DEBUG=1 in the environment that call raises, and says what differs"
        )


def _begin_exchange(group: ProcessGroup, digest: int, device: torch.device) -> Callable[[], Tensor]:
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


# ------------------------------------------------------------------------------- calls that differ
# Ranks that disagree in a new call raise, all of them, instead of waiting for each other.
#
# Before the first call of every new signature the ranks of a group exchange it: shapes, dtype,
# options. Later calls of the same signature exchange nothing. So where a call is new to some ranks
# and known to others, the former wait for an exchange that the latter do not enter, until the
# group's timeout.
#
# Packed documents and their number of rows are compared in that exchange, but are no part of the
# signature: they change with every step, whose host must not wait. Afterwards a rank checks only
# its own, and `watch` compares a digest of all of them now and then. With FLASH_EXT_DEBUG=1 every
# call with documents has an exchange, which names at once what differs.

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
        ValueError: on every rank, naming the ranks, what differs and the values; or the error
            of one of them. If only the packing is new: an error of this rank.
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
    """The error, in words, or None if all are equal.

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


# ------------------------------------------------------------------------------------------ a call
Group = ProcessGroup | DeviceMesh | None
"""A process group, None for all ranks; or a mesh of one dimension, or of two: (across, within)."""


def groups_of(group: Group) -> Groups:
    """The process groups that a call communicates in.

    Raises:
        ValueError: a mesh of more than two dimensions, or no process group was made.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            refuse("group", "a mesh of one or two dimensions", f"one of {group.ndim}")
        return Groups(*(group.get_group(i) for i in range(group.ndim)))
    if group is None and not dist.is_initialized():
        refuse("group", "given, or a default one made by init_process_group", None)
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    return Groups(whole)


def shards_of(groups: Groups, rows: int, layout: str, documents: Documents | None) -> Sharding:
    """The rows of every rank; with two dimensions rank (i, j) is number i · (size of j) + j."""
    shards = sharding(rows, groups.across_size, layout, documents)
    return shards if groups.within is None else shards.nested(groups.within_size)


def on_host(cu_seqlens: Tensor | Sequence[int] | None) -> Documents | None:
    """cu_seqlens as numbers of the host."""
    if cu_seqlens is None:
        return None
    return documents_of(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)


def require_documents(documents: Documents, rows: int) -> None:
    """Refuse what cannot be cu_seqlens of this number of rows."""
    if not documents or documents[0] != 0 or documents.shortest < 0 or documents[-1] > rows:
        refuse(
            "cu_seqlens",
            f"from 0 on, never decreasing, up to the sequence's {rows} rows",
            tuple(documents),
        )


class Request(NamedTuple):
    """Arguments of `attention` that are neither tensors nor options of the ops."""

    method: str
    transport: str
    layout: str
    seqlen: int | None
    causal: bool
    window: tuple[int, int]
    gradients: bool
    """Whether a backward pass may follow."""


def _check_rows(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    rows: int,
) -> Sharding:
    """Refuse documents, and numbers of rows of the tensors, that `rows` of the sequence cannot
    have; return what each rank has."""
    if documents is not None:
        require_documents(documents, rows)
    shards, rank = shards_of(groups, rows, request.layout, documents), groups.rank
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[-3] != shards.lengths[rank]:
            refuse(
                f"{name}'s number of rows on rank {rank}",
                f"{shards.lengths[rank]} of the sequence's {rows} (pass seqlen where the"
                " ranks' numbers of rows are not equal)",
                x.shape[-3],
            )
    return shards


def _check(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    rows: int,
    mask: Mask,
    options: Options,
) -> None:
    """Refuse this rank's errors, before anything travels. `rows`: of the sequence."""
    dims = 4 if documents is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            wanted = "(batch, rows, heads, dim)" if dims == 4 else "(rows, heads, dim)"
            with_documents = "" if dims == 4 else " with cu_seqlens"
            refuse(name, f"of shape {wanted}{with_documents}", tuple(x.shape))
        require_device(name, x, q)
    shards = _check_rows(request, groups, q, k, v, documents, rows)
    slopes = options.get("alibi_slopes")
    if documents is not None and slopes is not None and slopes.dim() != 1:
        refuse("alibi_slopes", "of shape (heads_q) with cu_seqlens", tuple(slopes.shape))
    for name, x in (("q", q), ("k", k)):
        if x.dtype in QK_8_BITS:
            refuse(name, "of more than 8 bits", dtype_name(x.dtype))
    method, transport = request.method, request.transport
    if method != "auto" and (
        reason := unsupported_reason(method, groups, q, k, shards, mask, options)
    ):
        raise ValueError(f"flash_ext: {reason}")
    if transport not in TRANSPORTS:
        refuse("transport", " or ".join(map(repr, TRANSPORTS)), repr(transport))
    masks: Options = {"causal": mask.right == 0}
    if mask.left is not None:
        masks["window_left"] = mask.left
    ops.check(*(x if dims == 4 else x[None] for x in (q, k, v)), **options, **masks)


def _agree(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    rows: int,
    mask: Mask,
    options: Options,
) -> None:
    """Return if all ranks ask for the same, and nothing is wrong; as `_check`."""
    same: dict[str, Any] = {
        "batch": q.shape[0] if q.dim() == 4 else None,
        "heads of q": q.shape[-2],
        "heads of k": k.shape[-2],
        "heads of v": v.shape[-2],
        "head dim of q": q.shape[-1],
        "head dim of k": k.shape[-1],
        "head dim of v": v.shape[-1],
        "dtypes of q, k and v": tuple(dtype_name(x.dtype) for x in (q, k, v)),
        "contiguous rows of q, k and v": tuple(x.stride(-1) == 1 for x in (q, k, v)),
        "gradients wanted": request.gradients,
        "layout": request.layout,
        "method": request.method,
        "transport": request.transport,
        "causal": request.causal,
        "window": request.window,
        "with cu_seqlens": documents is not None,
    }
    for name, value in options.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else value
        same[name] = ("a tensor", *shape) if isinstance(value, Tensor) else value
    named = "seqlen"
    if request.seqlen is None:
        named = "seqlen (which must be given if ranks have unequal numbers of rows)"
    packing: dict[str, Any] = {} if documents is None else {"cu_seqlens": documents}
    (same if documents is None else packing)[named] = rows
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    asked = request, groups, q, k, v, documents, rows
    check, check_rows = partial(_check, *asked, mask, options), partial(_check_rows, *asked)
    agree(groups.last_first, same, packing, shapes, check, check_rows, q.device)


def prepare(
    request: Request,
    groups: Groups,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    options: Options,
    new: bool = True,
) -> tuple[Core, tuple[Tensor, Tensor, Tensor]]:
    """The method for this rank, and q, k and v as it takes them: (B, rows, H, D).

    Args:
        request: the call.
        groups: whose ranks all call this.
        q, k, v, cu_seqlens: as in `attention`.
        options: of the ops.
        new: whether anything may be wrong: not in the backward pass of a call.

    Raises:
        ValueError, RuntimeError: as `attention` does.
    """
    documents, seqlen = on_host(cu_seqlens), request.seqlen
    mask = Mask.of(request.causal, request.window, documents)
    if seqlen is None:
        seqlen = documents[-1] if documents else q.shape[-3] * groups.ranks
    if new:
        _agree(request, groups, q, k, v, documents, seqlen, mask, options)
    shards = shards_of(groups, seqlen, request.layout, documents)
    require(request.transport, groups.last_first, q.device)
    if documents is not None:
        q, k, v = (x[None] for x in (q, k, v))
    method = request.method
    if method == "auto":
        method = choose_method(groups, q, k, v, shards, mask, options, request.transport)
    moves = partial(make, request.transport, q.device)
    return build(method, groups, shards, mask, q, k, v, moves), (q, k, v)
