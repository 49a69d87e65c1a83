"""Numbers of the host on a device, without a wait: offsets of documents, orders of rows."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .kept import MOST_BYTES, Kept, bytes_of, kept

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


class _Made:
    """Tensors of a device, for all its streams."""

    def __init__(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        self.tensors, self.nbytes, self._device = tensors, bytes_of(tensors), device
        self._streams: set[torch.cuda.Stream] = set()
        if device.type == "cuda":
            self._made = torch.cuda.current_stream(device.index).record_event()

    def here(self) -> tuple[Tensor, ...]:
        """They are there when what is enqueued next on the current stream begins."""
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
        """The result, for what the current stream does next; nobody writes to it."""
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
        """These numbers there; a tensor that is kept, so nobody writes to it."""
        return self.host if device.type == "cpu" else _copies.on(self, device)[0]


_copies = KeptOnDevices(lambda of, device: (moved(of.host, device),))


@kept()
def _few(values: tuple[int, ...]) -> Numbers:
    return Numbers(numbers(values, torch.int32))


def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A few integers on a device, int32; kept as `Numbers` are."""
    return _few(values).on(device)
