"""Numbers of the host on a device, without a wait: offsets of documents, orders of rows."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .kept import Kept, kept

T = TypeVar("T")

ON_HOST: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
"""What plans are made of, whatever the default device is."""


def numbers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers as a tensor of the host. (torch.tensor takes three times as long.)"""
    if not values:
        return torch.empty(0, dtype=dtype, device="cpu")
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


def for_stream(cache: Kept[T], x: object, device: torch.device) -> T:
    """cache(x, device, stream), of tensors on a device: on another stream than the one that made
    them they may not be there yet. While a graph is captured, what a call before has made."""
    if captures(device):  # which no work of other streams is beside
        found = cache.newest(lambda arguments: arguments[:2] == (x, device))
        if found is None:
            found = cache.function(x, device, 0)
        _of_graphs.append(found)
        return found
    on_gpu = device.type == "cuda"
    return cache(x, device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)


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
        return self.host if device.type == "cpu" else for_stream(_copies, self, device)


@kept()
def _copies(of: Numbers, device: torch.device, stream: int) -> Tensor:
    return moved(of.host, device)


@kept()
def _few(values: tuple[int, ...]) -> Numbers:
    return Numbers(numbers(values, torch.int32))


def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A few integers on a device, int32; kept as `Numbers` are."""
    return _few(values).on(device)
