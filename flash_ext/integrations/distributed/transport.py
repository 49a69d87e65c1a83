"""How rows travel between ranks: every communication of this package, and nothing else.

Each verb of `Transport` begins a transfer and returns a `Pending`, whose `wait` gives the result.
On CUDA everything is enqueued and nothing waits on the host: a transfer begins once the work that
was enqueued before it is done, and `wait` holds back only what is enqueued later. So a transfer is
begun before the kernel that hides it, which would otherwise fill all SMs first.

Verbs speak of tensors whose first dimension is the rows: (rows, batch, heads, …). The rows of the
whole sequence are in its order, whatever the layout. Ranks may have unequal numbers of rows; what
travels is padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...ops.checks import statistics_dtype
from .sharding import Sharding

# Named so since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A transfer that has begun."""

    def __init__(self, what: str, works: list[Any], finish: Callable[[], Tensor]) -> None:
        self._what, self._works, self._finish = what, works, finish

    def wait(self) -> Tensor:
        """The result, for what the current stream does next. Call it once.

        Raises:
            RuntimeError: the transfer failed or timed out; the message names it.
        """
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"flash_ext: {self._what} did not complete: {error}") from error
        return self._finish()


def ready(x: Tensor) -> Pending:
    """A transfer that had nothing to do."""
    return Pending("nothing", [], lambda: x)


class Transport(Protocol):
    """What methods ask of a transport. `what` names a transfer in errors."""

    ranks: int
    rank: int

    def gather(self, x: Tensor, what: str) -> Pending:
        """The whole sequence (S, …) from every rank's rows x (rows, …)."""

    def scatter(self, x: Tensor, what: str) -> Pending:
        """This rank's rows (rows, …) of the sum over ranks of x (S, …), summed in float32 (float64)
        and returned so."""

    def to_heads(self, x: Tensor, what: str) -> Pending:
        """The whole sequence of this rank's part of the heads, (S, B, H / n, …), from every rank's
        rows of all heads, x (rows, B, H, …)."""

    def to_rows(self, x: Tensor, what: str) -> Pending:
        """The way back: this rank's rows of all heads from (S, B, H / n, …)."""

    def shift(self, x: Tensor, by: int, what: str) -> Pending:
        """x of rank - by, of the same shape on every rank."""


class Collectives:
    """The transport by collectives of torch.distributed, with any backend that has all_gather,
    all_to_all, send and recv: NCCL and gloo among them.

    There is no reduce_scatter: sums travel as all_to_all in the tensor's own dtype and are then
    added in float32 in the order of the ranks, which moves half the bytes of a reduce_scatter in
    float32, rounds less than one in bfloat16, and repeats bit by bit.
    """

    def __init__(self, group: ProcessGroup, shards: Sharding) -> None:
        self.group, self.shards = group, shards
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def _rows(self) -> int:
        return self.shards.lengths[self.rank]

    def _padded(self, x: Tensor) -> Tensor:
        if x.shape[0] == self.shards.most:
            return x.contiguous()
        padded = x.new_zeros((self.shards.most, *x.shape[1:]))
        padded[: x.shape[0]] = x
        return padded

    def _begin(self, what: str, collective: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return collective(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            raise RuntimeError(f"flash_ext: {what} did not begin: {error}") from error

    def gather(self, x: Tensor, what: str) -> Pending:
        """As `Transport` says."""
        if self.ranks == 1 or self.shards.most == 0:
            return ready(x)
        x = self._padded(x)
        every = x.new_empty((self.ranks, *x.shape))
        work = self._begin(what, _all_gather, every.flatten(0, 1), x)
        return Pending(what, [work], lambda: self.shards.join(every))

    def _exchange(self, what: str, x: Tensor, finish: Callable[[Tensor], Tensor]) -> Pending:
        """x (n, …): x[p] to rank p. finish gets what came from each rank."""
        x = x.contiguous()
        if self.ranks == 1 or x.numel() == 0:
            return Pending(what, [], lambda: finish(x))
        received = torch.empty_like(x)
        work = self._begin(what, dist.all_to_all_single, received.flatten(0, 1), x.flatten(0, 1))
        return Pending(what, [work], lambda: finish(received))

    def scatter(self, x: Tensor, what: str) -> Pending:
        """As `Transport` says."""
        dtype = statistics_dtype(x.dtype)
        return self._exchange(
            what, self.shards.split(x), lambda parts: parts[:, : self._rows].sum(0, dtype=dtype)
        )

    def to_heads(self, x: Tensor, what: str) -> Pending:
        """As `Transport` says."""
        by_rank = x.unflatten(2, (self.ranks, -1)).movedim(2, 0)
        if x.shape[0] < self.shards.most:
            padded = by_rank.new_zeros((self.ranks, self.shards.most, *by_rank.shape[2:]))
            padded[:, : x.shape[0]] = by_rank
            by_rank = padded
        return self._exchange(what, by_rank, self.shards.join)

    def to_rows(self, x: Tensor, what: str) -> Pending:
        """As `Transport` says."""
        return self._exchange(
            what,
            self.shards.split(x),
            lambda parts: parts[:, : self._rows].movedim(0, 2).flatten(2, 3),
        )

    def shift(self, x: Tensor, by: int, what: str) -> Pending:
        """As `Transport` says."""
        if by % self.ranks == 0:
            return ready(x)
        x = x.contiguous()
        received = torch.empty_like(x)
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
        return Pending(what, works, lambda kept=x: received)  # type: ignore[misc]
