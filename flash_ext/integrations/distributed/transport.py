"""How rows travel between ranks: every communication of this package, and nothing else.

Each verb of `Transport` begins a transfer and returns a `Pending`, whose `wait` gives the result.
On CUDA everything is enqueued and nothing waits on the host: a transfer begins once the work that
was enqueued before it is done, and `wait` holds back only later work.

There are two transports: `Collectives` here, of any backend, and `engines.CopyEngines`, for GPUs of
one host. Tensors are (B, rows, H, ...). The rows of the whole sequence are in its order, whatever
the layout. Ranks may have unequal numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ... import ops
from ...ops.checks import statistics_dtype
from ...ops.sum_rows import MOST_OUTS, MOST_PARTS
from .sharding import FEW_SPANS, Sharding, Span

# -------------------------------------------------------------------------------------------- rows
# Tensors of rows: copies at full speed, sums of parts, and tensors side by side.
#
# A method has tensors (B, rows, H, ...); what travels is a block (rows, B, H, ...) each, so that
# consecutive rows are consecutive bytes.

AT_ONCE = 4
"""How many results of all rows are kept until they are added up, or more of some rows each."""


def many(kept: Sequence[int], rows: int) -> bool:
    """Whether this number of rows is to be added up before another result of all `rows` is kept."""
    return len(kept) == MOST_PARTS or sum(kept) > (AT_ONCE - 1) * rows


Rows = tuple[Tensor, ...]
"""Tensors (B, rows, H, ...) that travel together: the same rows, and maybe unequal shapes."""

Parts = Sequence[tuple[Span, Rows]]
"""Gradients of some rows each: the rows, and tensors (B, those rows, H, D)."""

_WIDE = (torch.complex128, torch.int64, torch.int32)
"""Types of 16, 8 and 4 bytes, in which elements are copied several at once."""


def widest(*tensors: Tensor) -> torch.dtype:
    """Of elements of 16 bytes, or of as many as all of these, of one dtype, can be seen as."""
    numbers, dtype = 0, tensors[0].dtype
    for x in tensors:
        if x.dim() == 0 or x.stride(-1) != 1:
            return dtype
        for number in (x.shape[-1], int(x.storage_offset()), *x.stride()[:-1]):
            numbers |= number
    most = (numbers & -numbers) * dtype.itemsize  # the largest power of 2 that divides all bytes
    return next((wide for wide in _WIDE if dtype.itemsize < wide.itemsize <= most), dtype)


def _widened(out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both, of one dtype, as elements of 16 bytes, or of as many as fit."""
    wide = widest(out, x)
    return (out, x) if wide == x.dtype else (out.view(wide), x.view(wide))


def copy(out: Tensor, x: Tensor) -> None:
    """out[...] = x. Torch copies strided tensors element by element: here elements of 16 bytes."""
    if out.dtype == x.dtype and not (out.is_contiguous() and x.is_contiguous()):
        out, x = _widened(out, x)
    out.copy_(x)


def copy_to_all(outs: Sequence[Tensor], spans: Sequence[Span], x: Tensor) -> None:
    """Rows x (B, rows, H, D) to their spans of each of outs (S, B, H, D), which have the same
    strides and may be in the memory of other GPUs."""
    for places in zip(*(sections(out, spans) for out in outs), strict=True):
        part = x[:, slice(*places[0][1])]
        into = [place for place, _ in places]
        if into[0].dim() == 4:
            _to_all([place.transpose(0, 1) for place in into], part)
        else:  # two spans, which are a batch themselves
            for i, sequence in enumerate(part):
                _to_all([place[:, :, i] for place in into], sequence.unflatten(0, (2, -1)))


def _to_all(outs: Sequence[Tensor], x: Tensor) -> None:
    for i in range(0, len(outs), MOST_OUTS):
        ops.copy_rows(outs[i : i + MOST_OUTS], x)


def pick(out: Tensor, x: Tensor, index: Tensor) -> None:
    """out[i] = x[index[i]], whole rows of one dtype: one kernel, however they are scattered."""
    if out.numel() > 0:
        out, x = _widened(out, x)
        torch.index_select(x, 0, index, out=out)


def join(shards: Sharding, parts: Tensor) -> Tensor:
    """The whole sequence (S, …) from all ranks' rows (n, most, …), the rest being padding."""
    if shards.most_spans > FEW_SPANS:
        whole = parts.new_empty((shards.rows, *parts.shape[2:]))
        pick(whole, parts.flatten(0, 1), shards.orders(parts.device, padded=True)[1])
        return whole
    if shards.in_order and shards.rows == shards.ranks * shards.most:
        return parts.reshape(shards.rows, *parts.shape[2:])
    if shards.rows == 0:
        return parts.new_empty((0, *parts.shape[2:]))
    pieces = []
    for part, spans in zip(parts, shards.spans, strict=True):
        at = 0
        for a, b in spans:
            pieces.append((a, part[at : at + b - a]))
            at += b - a
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda x: x[0])])


def split(shards: Sharding, x: Tensor) -> Tensor:
    """All ranks' rows (n, most, …) of the whole sequence x (S, …), padded with anything."""
    whole = shards.rows == shards.ranks * shards.most
    shape = shards.ranks, shards.most, *x.shape[1:]
    if shards.most_spans > FEW_SPANS:
        found = x.new_empty((shards.ranks * shards.most, *x.shape[1:]))
        pick(found, x, shards.orders(x.device, padded=True)[0])
        return found.view(shape)
    if shards.in_order and whole:
        return x.view(shape)
    padding = None if whole else x.new_zeros((shards.most, *x.shape[1:]))
    parts = []
    for spans, length in zip(shards.spans, shards.lengths, strict=True):
        parts += [x[a:b] for a, b in spans]
        if padding is not None and length < shards.most:
            parts.append(padding[length:])
    return torch.cat(parts).view(shape)


def narrowed(x: Tensor, span: Span, dim: int = 0) -> Tensor:
    """Those rows of x; x itself if they are all of them, which costs the host less."""
    first, last = span
    return x if last - first == x.shape[dim] else x.narrow(dim, first, last - first)


def sections(x: Tensor, spans: Sequence[Span]) -> Iterator[tuple[Tensor, Span]]:
    """Spans of x (S, …) as views, and where their rows are if one span lies after the other. Two
    of equal length, as in a zigzag, are one view (2, rows, …): so they are one kernel's work."""
    if len(spans) == 2 and spans[0] < spans[1] and len({b - a for a, b in spans}) == 1:
        (a, b), (c, _) = spans
        strides = ((c - a) * x.stride(0), *x.stride())
        shape = (2, b - a, *x.shape[1:])
        yield x.as_strided(shape, strides, x.storage_offset() + a * x.stride(0)), (0, 2 * (b - a))
        return
    at = 0
    for a, b in spans:
        yield x[a:b], (at, at + b - a)
        at += b - a


def side_by_side(tensors: Rows, most: int) -> Tensor:
    """(most, B, H, ΣD), contiguous, from tensors (B, rows, H, D); rows from `rows` on are zeros."""
    first = tensors[0]
    dims = [x.shape[-1] for x in tensors]
    found = first.new_empty((most, first.shape[0], first.shape[2], sum(dims)))
    found[first.shape[1] :].zero_()
    for x, place in zip(tensors, found[: first.shape[1]].split(dims, -1), strict=True):
        copy(place, x.transpose(0, 1))
    return found


def apart(x: Tensor, dims: Sequence[int]) -> Rows:
    """Views (B, rows, H, D) of what `side_by_side` has put together."""
    return tuple(torch.split(x.transpose(0, 1), list(dims), dim=-1))


def total(parts: Parts, into: Rows, index: Tensor | None = None) -> None:
    """The sums of parts, formed in float32 (float64) in their order and rounded to the tensors'
    dtype: every row is written once, if with zeros, in one pass over memory.

    Args:
        parts: of any rows of the sequence.
        into: tensors (B, rows, H, D); without an index each may be the first part of all rows.
        index: int32 (rows), the rows of the sequence that `into` has; None: those from 0 on.
    """
    for i, out in enumerate(into):
        firsts = [span[0] for span, _ in parts]
        tensors = [x[i] for _, x in parts]
        if len(tensors) > MOST_PARTS:
            head = torch.empty(
                (out.shape[0], max(span[1] for span, _ in parts), *out.shape[2:]),
                dtype=statistics_dtype(out.dtype),
                device=out.device,
            )
            while len(tensors) > MOST_PARTS:
                ops.sum_rows(head, tensors[:MOST_PARTS], firsts[:MOST_PARTS])
                tensors, firsts = [head, *tensors[MOST_PARTS:]], [0, *firsts[MOST_PARTS:]]
        ops.sum_rows(out, tensors, firsts, index)


def add_in_place(parts: Parts, into: Rows) -> None:
    """As `total`, where the first part, if there is one, has been written to its place."""
    first, last = parts[0][0] if parts else (0, 0)
    for x in into:
        if first > 0:
            x[:, :first].zero_()
        if last < x.shape[1]:
            x[:, last:].zero_()
    for span, part in parts[1:]:
        here = tuple(x[:, slice(*span)] for x in into)
        whole = (0, span[1] - span[0])
        total([(whole, here), (whole, part)], here)


def add_up(parts: Tensor, out: Tensor) -> None:
    """out (rows, B, H, D) = the sum over the first dimension of parts (n, rows, B, H, D)."""
    whole = (0, out.shape[0])
    total([(whole, (x.transpose(0, 1),)) for x in parts], (out.transpose(0, 1),))


class Sum:
    """Gradients (B, rows, H, D) of several steps: added up in one pass, but a few at a time, so
    that not all of many are kept."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._parts: list[tuple[Span, Rows]] = []

    def add(self, part: Tensor, first: int = 0) -> None:
        """A gradient of the rows from `first` on. It must not be written again."""
        if many([last - first for (first, last), _ in self._parts], self._like.shape[1]):
            sums = torch.empty_like(self._like, dtype=statistics_dtype(self._like.dtype))
            total(self._parts, (sums,))
            self._parts = [((0, sums.shape[1]), (sums,))]
        self._parts.append(((first, first + part.shape[1]), (part,)))

    def found(self) -> Tensor:
        """The sum, in the dtype of `like`; a part itself if it is the only one."""
        if len(self._parts) == 1:
            ((first, last), (part,)) = self._parts[0]
            if (first, last) == (0, self._like.shape[1]) and part.dtype == self._like.dtype:
                return part
        out = torch.empty_like(self._like)
        total(self._parts, (out,))
        return out


# -------------------------------------------------------------------------------------- transports
T = TypeVar("T")

# Named so since torch 2.13.
all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class Pending(Generic[T]):
    """A transfer that has begun."""

    def __init__(self, what: str, waits: Sequence[Callable[[], object]], finish: Callable[[], T]):
        self._what, self._waits, self._finish = what, waits, finish

    def wait(self) -> T:
        """The result, for what the current stream does next. Call it once.

        Raises:
            RuntimeError: the transfer failed or timed out; the message names it.
        """
        for wait in self._waits:
            try:
                wait()
            except RuntimeError as error:
                raise RuntimeError(f"flash_ext: {self._what} did not complete: {error}") from error
        return self._finish()


Begin = Callable[[int], Pending[Rows]]
"""Begins a transfer by its number; each is begun once, in order."""


class Transport(Protocol):
    """What methods ask of a transport. `what` names a transfer in errors."""

    ranks: int
    rank: int

    needs_sms: bool
    """Whether a transfer must begin before the kernel that hides it, which would otherwise fill all
    SMs first. If not it begins after: the kernel need not wait for the host."""

    def gather(self, tensors: Rows, pieces: Sequence[int], what: str) -> Begin:
        """From every rank's rows to the whole sequence, (B, S, H, D), of piece i = 0, 1, …

        Args:
            tensors: (B, rows, H, D), of one dtype.
            pieces: how many of the heads are in each.
            what: names the transfer.
        """

    def rotate(self, tensors: Rows, steps: int, what: str) -> Begin:
        """The rows (B, m, H, D) of rank - t, for t = 1 to steps - 1; m is at least that rank's
        number of rows. Each is begun after the one before has been waited for."""

    def scatter(self, into: Rows, what: str) -> tuple[Rows, Callable[[Parts], Pending[None]]]:
        """This rank's rows of the sum over ranks.

        Args:
            into: (B, rows, H, D); holds the sums, which are formed in float32, after `wait`.
            what: names the transfer.

        Returns:
            Tensors (B, S, H, D) of the whole sequence, and a function that begins the transfer
            of what this rank adds: the sum of parts, the first of which is its rows of these
            tensors. It travels in its own dtype.
        """

    def shift(self, parts: Parts, like: Rows, by: int, what: str) -> Pending[Rows]:
        """The parts of rank - by for this rank's rows, (B, rows, H, D).

        Args:
            parts: for the rows of rank + by.
            like: tensors (B, rows, H, D) of this rank, for shapes and dtypes.
            by: how many ranks.
            what: names the transfer.
        """

    def to_heads(self, tensors: Rows, what: str) -> Pending[Rows]:
        """The whole sequence of this rank's part of the heads, (B, S, H / n, …), from every rank's
        rows of all heads, (B, rows, H, …). Dtypes may differ."""

    def to_rows(self, tensors: Rows, into: Rows, what: str) -> Pending[None]:
        """The way back, from (B, S, H / n, …) to `into`, (B, rows, H, …)."""


class Collectives:
    """The transport by collectives of torch.distributed, with any backend that has all_gather,
    all_to_all, send and recv: NCCL and gloo among them.

    There is no reduce_scatter: sums travel as all_to_all in the tensor's own dtype and are then
    added in float32 in the order of the ranks, which moves half the bytes of a reduce_scatter in
    float32, rounds less than one in bfloat16, and repeats bit by bit.

    What travels is padded to the largest number of rows.
    """

    needs_sms = True

    def __init__(self, group: ProcessGroup, shards: Sharding) -> None:
        self.group, self.shards = group, shards
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def _rows(self) -> int:
        return self.shards.lengths[self.rank]

    def _begin(
        self, what: str, collective: Callable[..., Any], *arguments: Any
    ) -> Callable[[], object]:
        """Begin a collective, and return its wait."""
        try:
            work = collective(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            raise RuntimeError(f"flash_ext: {what} did not begin: {error}") from error
        return work.wait  # type: ignore[no-any-return]

    def gather_rows(self, x: Tensor, what: str) -> Pending[Tensor]:
        """The whole sequence (S, …) from every rank's rows x (rows, …)."""
        if self.ranks == 1 or self.shards.most == 0:
            return Pending(what, [], lambda: x)
        sent = x.contiguous()
        if x.shape[0] < self.shards.most:
            sent = x.new_zeros((self.shards.most, *x.shape[1:]))
            sent[: x.shape[0]] = x
        every = x.new_empty((self.ranks, *sent.shape))
        wait = self._begin(what, all_gather, every.flatten(0, 1), sent)
        return Pending(what, [wait], lambda: join(self.shards, every))

    def gather(self, tensors: Rows, pieces: Sequence[int], what: str) -> Begin:
        """As `Transport` says."""
        of_pieces = list(zip(*(x.split(pieces, 2) for x in tensors), strict=True))
        dims = [x.shape[-1] for x in tensors]

        def begin(i: int) -> Pending[Rows]:
            named = f"{what}, piece {i + 1} of {len(pieces)}"
            mine = side_by_side(of_pieces[i], tensors[0].shape[1])
            pending = self.gather_rows(mine, named)
            return Pending(named, [], lambda: apart(pending.wait(), dims))

        return begin

    def _exchange(self, what: str, x: Tensor, finish: Callable[[Tensor], T]) -> Pending[T]:
        """x (n, …): x[p] to rank p. finish gets what came from each rank."""
        x = x.contiguous()
        if self.ranks == 1 or x.numel() == 0:
            return Pending(what, [], lambda: finish(x))
        received = x.new_empty(x.shape)
        wait = self._begin(what, dist.all_to_all_single, received.flatten(0, 1), x.flatten(0, 1))
        return Pending(what, [wait], lambda: finish(received))

    def scatter(self, into: Rows, what: str) -> tuple[Rows, Callable[[Parts], Pending[None]]]:
        """As `Transport` says."""
        dims = [x.shape[-1] for x in into]
        batch, _, heads, _ = into[0].shape
        whole = into[0].new_empty((self.shards.rows, batch, heads, sum(dims)))

        def finish(received: Tensor) -> None:
            of_ranks = received[:, : self._rows].split(dims, -1)
            for x, out in zip(of_ranks, into, strict=True):
                add_up(x, out.transpose(0, 1))

        def begin(parts: Parts) -> Pending[None]:
            add_in_place(parts, apart(whole, dims))
            return self._exchange(what, split(self.shards, whole), finish)

        return apart(whole, dims), begin

    def to_heads(self, tensors: Rows, what: str) -> Pending[Rows]:
        """As `Transport` says."""

        def begin(x: Tensor) -> Pending[Tensor]:
            by_rank = x.transpose(0, 1).unflatten(2, (self.ranks, -1)).movedim(2, 0)
            sent = by_rank.new_empty((self.ranks, self.shards.most, *by_rank.shape[2:]))
            copy(sent[:, : x.shape[1]], by_rank)
            sent[:, x.shape[1] :].zero_()
            return self._exchange(what, sent, lambda y: join(self.shards, y).transpose(0, 1))

        begun = [begin(x) for x in tensors]
        return Pending(what, [], lambda: tuple(pending.wait() for pending in begun))

    def to_rows(self, tensors: Rows, into: Rows, what: str) -> Pending[None]:
        """As `Transport` says."""

        def begin(x: Tensor, out: Tensor) -> Pending[None]:
            of_ranks = out.transpose(0, 1).unflatten(2, (self.ranks, -1))

            def finish(received: Tensor) -> None:
                copy(of_ranks, received[:, : self._rows].movedim(0, 2))

            return self._exchange(what, split(self.shards, x.transpose(0, 1)), finish)

        begun = [begin(x, out) for x, out in zip(tensors, into, strict=True)]

        def finish() -> None:
            for pending in begun:
                pending.wait()

        return Pending(what, [], finish)

    def _send(self, x: Tensor, by: int, what: str) -> Pending[Tensor]:
        """x of rank - by, of the same shape on every rank."""
        received = x.new_empty(x.shape)
        to, source = ((self.rank + way * by) % self.ranks for way in (1, -1))
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(self.group, peer), self.group)
            for operation, tensor, peer in ((dist.isend, x, to), (dist.irecv, received, source))
        ]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise RuntimeError(f"flash_ext: {what} did not begin: {error}") from error
        # x stays alive until it has been sent.
        return Pending(what, [work.wait for work in works], lambda kept=x: received)  # type: ignore[misc]

    def rotate(self, tensors: Rows, steps: int, what: str) -> Begin:
        """As `Transport` says: each rank hands on what it got."""
        dims = [x.shape[-1] for x in tensors]
        here = side_by_side(tensors, self.shards.most) if steps > 1 else tensors[0]

        def begin(t: int) -> Pending[Rows]:
            named = f"{what}, step {t}"
            pending = self._send(here, 1, named)

            def finish() -> Rows:
                nonlocal here
                here = pending.wait()
                return apart(here, dims)

            return Pending(named, [], finish)

        return begin

    def shift(self, parts: Parts, like: Rows, by: int, what: str) -> Pending[Rows]:
        """As `Transport` says."""
        dims = [x.shape[-1] for x in like]
        batch, _, heads, _ = like[0].shape
        sent = like[0].new_empty((self.shards.most, batch, heads, sum(dims)))
        total(parts, apart(sent, dims))
        pending = self._send(sent, by, what)
        return Pending(what, [], lambda: apart(pending.wait()[: self._rows], dims))
