"""How rows travel between ranks: every communication of this package, and nothing else.

Each verb of `Transport` begins a transfer and returns a `Pending`, whose `wait` gives the result.
On CUDA everything is enqueued and nothing waits on the host: a transfer begins once the work that
was enqueued before it is done, and `wait` holds back only what is enqueued later.

There are two transports: `Collectives` here, of any backend, and `engines.CopyEngines`, for GPUs of
one host. Tensors are (B, rows, H, ...). The rows of the whole sequence are in its order, whatever
the layout. Ranks may have unequal numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from . import rows
from .rows import Parts, Rows
from .sharding import Sharding

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
        return Pending(what, [wait], lambda: rows.join(self.shards, every))

    def gather(self, tensors: Rows, pieces: Sequence[int], what: str) -> Begin:
        """As `Transport` says."""
        of_pieces = list(zip(*(x.split(pieces, 2) for x in tensors), strict=True))
        dims = [x.shape[-1] for x in tensors]

        def begin(i: int) -> Pending[Rows]:
            named = f"{what}, piece {i + 1} of {len(pieces)}"
            mine = rows.side_by_side(of_pieces[i], tensors[0].shape[1])
            pending = self.gather_rows(mine, named)
            return Pending(named, [], lambda: rows.apart(pending.wait(), dims))

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
                rows.add_up(x, out.transpose(0, 1))

        def begin(parts: Parts) -> Pending[None]:
            rows.add_in_place(parts, rows.apart(whole, dims))
            return self._exchange(what, rows.split(self.shards, whole), finish)

        return rows.apart(whole, dims), begin

    def to_heads(self, tensors: Rows, what: str) -> Pending[Rows]:
        """As `Transport` says."""

        def begin(x: Tensor) -> Pending[Tensor]:
            by_rank = x.transpose(0, 1).unflatten(2, (self.ranks, -1)).movedim(2, 0)
            sent = by_rank.new_empty((self.ranks, self.shards.most, *by_rank.shape[2:]))
            rows.copy(sent[:, : x.shape[1]], by_rank)
            sent[:, x.shape[1] :].zero_()
            return self._exchange(what, sent, lambda y: rows.join(self.shards, y).transpose(0, 1))

        begun = [begin(x) for x in tensors]
        return Pending(what, [], lambda: tuple(pending.wait() for pending in begun))

    def to_rows(self, tensors: Rows, into: Rows, what: str) -> Pending[None]:
        """As `Transport` says."""

        def begin(x: Tensor, out: Tensor) -> Pending[None]:
            of_ranks = out.transpose(0, 1).unflatten(2, (self.ranks, -1))

            def finish(received: Tensor) -> None:
                rows.copy(of_ranks, received[:, : self._rows].movedim(0, 2))

            return self._exchange(what, rows.split(self.shards, x.transpose(0, 1)), finish)

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
        here = rows.side_by_side(tensors, self.shards.most) if steps > 1 else tensors[0]

        def begin(t: int) -> Pending[Rows]:
            named = f"{what}, step {t}"
            pending = self._send(here, 1, named)

            def finish() -> Rows:
                nonlocal here
                here = pending.wait()
                return rows.apart(here, dims)

            return Pending(named, [], finish)

        return begin

    def shift(self, parts: Parts, like: Rows, by: int, what: str) -> Pending[Rows]:
        """As `Transport` says."""
        dims = [x.shape[-1] for x in like]
        batch, _, heads, _ = like[0].shape
        sent = like[0].new_empty((self.shards.most, batch, heads, sum(dims)))
        rows.total(parts, rows.apart(sent, dims))
        pending = self._send(sent, by, what)
        return Pending(what, [], lambda: rows.apart(pending.wait()[: self._rows], dims))
