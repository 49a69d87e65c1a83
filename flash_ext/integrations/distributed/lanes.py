"""Pieces on two streams by turns: SMs that have done their part of one piece begin the next.

A piece of few heads has few tiles, and under a causal mask unequal ones: the last of them leave
most SMs idle, longest in the first piece, which is small so that little must travel before it. On
one stream the next piece's kernel would wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import TracebackType

import torch


@lru_cache(maxsize=64)
def _other(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Lanes:
    """The caller's stream and one beside it, for pieces that do not depend on each other.

    What is enqueued before `with Lanes(...)` comes before all pieces, what is enqueued after it
    comes after them. Memory of the caller's stream that a piece reads or writes must be taken
    before, and kept until then.
    """

    def __init__(self, device: torch.device, beside: bool) -> None:
        """Without `beside`, all is on the caller's stream."""
        self._streams: list[torch.cuda.Stream] = []
        if beside and device.type == "cuda":
            self._streams = [torch.cuda.current_stream(device.index), _other(device)]

    def __enter__(self) -> Lanes:
        if self._streams:
            here, other = self._streams
            other.wait_stream(here)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._streams:
            here, other = self._streams
            here.wait_stream(other)

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """What is enqueued within belongs to piece i."""
        with torch.cuda.stream(self._streams[1]) if self._streams and i % 2 else nullcontext():
            yield
