"""Numbers of the host on a device without a wait, caches for later calls, and streams."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, update_wrapper
from threading import Lock
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...ops.torch_private import ordinary_tensors

# ------------------------------------------------------------------------------------------ caches
# What calls keep for later ones: caches that are bounded in bytes.
#
# Packed documents change with every step of a training, and what was planned for them is of use for
# all layers of a step, and then never again. So a cache keeps the newest results, up to a number
# of bytes.

T = TypeVar("T")

MOST_BYTES = 8 << 20
"""A dozen packings of a thousand documents on eight ranks."""

MOST_RESULTS = 32
"""Some micro-batches of a step, each with what its layers need."""

A_RESULT = 512
"""Bytes of a result and its key beside their tensors and tuples, about."""

AN_INTEGER = 40
"""Bytes of one in a tuple, about."""


def bytes_of(x: object) -> int:
    """Of tensors and of what says its `nbytes`, in tuples too; of integers, about."""
    size = getattr(x, "nbytes", None)
    if size is not None:
        return int(size)
    if not isinstance(x, (tuple, list)) or not x:
        return 0
    return AN_INTEGER * len(x) if isinstance(x[0], int) else sum(map(bytes_of, x))


class Kept(Generic[T]):
    """A function whose newest results are kept, by its arguments, which have a hash."""

    def __init__(self, function: Callable[..., T], most_bytes: int = MOST_BYTES) -> None:
        update_wrapper(self, function)
        self.function, self.most_bytes = function, most_bytes
        self.nbytes = 0
        self._results: OrderedDict[tuple[Hashable, ...], tuple[T, int]] = OrderedDict()
        self._lock = Lock()  # backward passes have their own threads

    def __call__(self, *arguments: Any) -> T:
        """The result; not a copy, so callers must not write to it."""
        with self._lock:
            found = self._results.get(arguments)
            if found is not None:
                self._results.move_to_end(arguments)
                return found[0]
        with ordinary_tensors():
            result = self.function(*arguments)
        size = A_RESULT + bytes_of(arguments) + bytes_of(result)
        with self._lock:
            first, _ = self._results.setdefault(arguments, (result, size))
            if first is not result:  # of another thread
                return first
            self.nbytes += size
            while len(self._results) > MOST_RESULTS or (
                self.nbytes > self.most_bytes and len(self._results) > 1
            ):
                self.nbytes -= self._results.popitem(last=False)[1][1]
        return result

    def known(self, *arguments: Any) -> T | None:
        """The result if it is kept, or None."""
        with self._lock:
            return self._results.get(arguments, (None, 0))[0]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._results.clear()
            self.nbytes = 0


def kept(most_bytes: int = MOST_BYTES) -> Callable[[Callable[..., T]], Kept[T]]:
    """A decorator: functools.lru_cache for results of which some are large."""
    return lambda function: Kept(function, most_bytes)


# ----------------------------------------------------------------------------------------- numbers
HOST = torch.device("cpu")
"""What plans are made on, whatever the default device is."""


def numbers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers as a tensor of the host. (array.array needs twice the time, and torch.tensor six
    times.)"""
    if not values:
        return torch.empty(0, dtype=dtype, device=HOST)
    code = {torch.int64: "q", torch.int32: "i"}[dtype]
    return torch.frombuffer(bytearray(struct.pack(f"{len(values)}{code}", *values)), dtype=dtype)


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_of_graphs: list[object] = []
"""What captured graphs read at each replay: for as long as the process runs, since nothing tells
when a graph is gone."""


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; the host does not wait for the copy."""
    if device.type == "cpu":
        return x
    pinned = x.pin_memory()
    if captures(device):
        _of_graphs.append(pinned)
    return pinned.to(device, non_blocking=True)


class _Made:
    """Tensors of a device, for all its streams."""

    def __init__(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        self.tensors, self.nbytes, self._device = tensors, bytes_of(tensors), device
        self._streams: set[torch.cuda.Stream] = set()
        if device.type == "cuda":
            self._made = torch.cuda.current_stream(device.index).record_event()

    def here(self) -> tuple[Tensor, ...]:
        """They are there when the next work of the current stream begins."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device.index)
            if stream not in self._streams:  # which another one made them on, maybe
                stream.wait_event(self._made)
                for x in self.tensors:
                    x.record_stream(stream)
                self._streams.add(stream)
        return self.tensors


class KeptOnDevices(Kept[_Made]):
    """A function of something of the host and a device, to tensors there: one result for all
    streams, and the newest are kept."""

    def __init__(self, make: Callable[..., tuple[Tensor, ...]], most_bytes: int = MOST_BYTES):
        super().__init__(lambda x, device: _Made(make(x, device), device), most_bytes)
        self._make = make

    def on(self, x: object, device: torch.device) -> tuple[Tensor, ...]:
        """The result, for what the current stream does next; callers must not write to it."""
        if not captures(device):
            return self(x, device).here()
        # What a call before has made, which no work of other streams is beside.
        made = self.known(x, device)
        tensors = self._make(x, device) if made is None else made.tensors
        _of_graphs.append(tensors)
        return tensors


class Numbers:
    """Integers of one plan, for all devices: int32 (n)."""

    def __init__(self, host: Tensor) -> None:
        self.host = host

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.host.nbytes

    def on(self, device: torch.device) -> Tensor:
        """These numbers there; a tensor that is kept, so callers must not write to it."""
        return self.host if device.type == "cpu" else _copies.on(self, device)[0]


_copies = KeptOnDevices(lambda of, device: (moved(of.host, device),))


@kept()
def _few(values: tuple[int, ...]) -> Numbers:
    return Numbers(numbers(values, torch.int32))


def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A few integers on a device, int32; kept as `Numbers` are."""
    return _few(values).on(device)


# ----------------------------------------------------------------------------------------- streams
# Pieces alternate between two streams: SMs that have done their part of one piece begin the next.
#
# A piece of few heads has few tiles, and under a causal mask unequal ones: the last of them leave
# most SMs idle, longest in the first piece, which is small so that little must travel before it. On
# one stream the next piece's kernel would wait for them.


@lru_cache(maxsize=64)
def _other(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Lanes:
    """The caller's stream and one beside it, for pieces that do not depend on each other.

    Work enqueued before `with Lanes(...)` comes before all pieces, work enqueued after it comes
    after them. Memory of the caller's stream that a piece reads or writes must be taken
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
        """Work enqueued within belongs to piece i."""
        with torch.cuda.stream(self._streams[1]) if self._streams and i % 2 else nullcontext():
            yield
