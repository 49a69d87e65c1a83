"""Numbers of the host on a device, without a wait: offsets of documents, orders of rows."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from .kept import MOST_BYTES, Kept, bytes_of, kept

T = TypeVar("T")  # a tensor, or several

HOST = torch.device("cpu")
"""What plans are made on, whatever the default device is."""


def numbers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers as a tensor of the host. (torch.tensor takes three times as long.)"""
    if not values:
        return torch.empty(0, dtype=dtype, device=HOST)
    code = {torch.int64: "q", torch.int32: "i"}[dtype]
    return torch.frombuffer(array.array(code, values), dtype=dtype)


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


class _Made(Generic[T]):
    """Tensors of a device, for all its streams."""

    def __init__(self, value: T, device: torch.device) -> None:
        self.value, self.nbytes, self._device = value, bytes_of(value), device
        self._streams: set[torch.cuda.Stream] = set()
        if device.type == "cuda":
            self._made = torch.cuda.current_stream(device).record_event()

    def here(self) -> T:
        """They are there when what is enqueued next on the current stream begins."""
        if self._device.type != "cuda":
            return self.value
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._streams:
            stream.wait_event(self._made)  # of the stream that made them, maybe
            one = isinstance(self.value, Tensor)
            for x in cast("tuple[Tensor, ...]", (self.value,) if one else self.value):
                x.record_stream(stream)
            self._streams.add(stream)
        return self.value


class KeptOnDevices(Kept[_Made[T]]):
    """A function of something of the host and a device, whose newest results are kept there, one
    for all streams. Nobody writes to them."""

    def __init__(self, function: Callable[[Any, torch.device], T], most_bytes: int) -> None:
        super().__init__(lambda x, device: _Made(function(x, device), device), most_bytes)
        self._make = function

    def on(self, x: object, device: torch.device) -> T:
        """The result, for what the current stream does next."""
        if not captures(device):
            return self(x, device).here()
        # What a call before has made, which no work of other streams is beside.
        made = self.known(x, device)
        value = self._make(x, device) if made is None else made.value
        _of_graphs.append(value)
        return value


def kept_on_devices(
    most_bytes: int = MOST_BYTES,
) -> Callable[[Callable[[Any, torch.device], T]], KeptOnDevices[T]]:
    """A decorator, as `kept`."""
    return lambda function: KeptOnDevices(function, most_bytes)


class Numbers:
    """Integers of one plan, for all devices: int32 (n)."""

    def __init__(self, host: Tensor) -> None:
        self.host = host

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.host.nbytes

    def on(self, device: torch.device) -> Tensor:
        """These numbers there; a tensor that is kept, so nobody writes to it."""
        return self.host if device.type == "cpu" else _copies.on(self, device)


@kept_on_devices()
def _copies(of: Numbers, device: torch.device) -> Tensor:
    return moved(of.host, device)


@kept()
def _few(values: tuple[int, ...]) -> Numbers:
    return Numbers(numbers(values, torch.int32))


def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A few integers on a device, int32; kept as `Numbers` are."""
    return _few(values).on(device)
