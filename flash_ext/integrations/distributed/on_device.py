"""Numbers of the host on a device, without a wait: offsets of documents, orders of rows."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .kept import kept

ON_HOST: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
"""What plans are made of, whatever the default device is."""


def numbers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers as a tensor of the host. (torch.tensor takes three times as long.)"""
    if not values:
        return torch.empty(0, dtype=dtype, device="cpu")
    code = {torch.int64: "q", torch.int32: "i"}[dtype]
    return torch.frombuffer(array.array(code, values), dtype=dtype)


def stream_of(device: torch.device) -> int:
    """What a tensor that is kept is kept for: on another stream it may not be there yet."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured. What it holds is there after a replay, not now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_read_by_graphs: list[Tensor] = []
"""Pinned memory that captured copies read at each replay: for as long as the process runs, since
nothing tells when a graph is gone."""


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; the host does not wait for the copy."""
    if device.type == "cpu":
        return x
    pinned = x.pin_memory()
    if captures(device):
        _read_by_graphs.append(pinned)
    return pinned.to(device, non_blocking=True)


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
        if device.type == "cpu":
            return self.host
        if captures(device):
            return moved(self.host, device)
        return _copies(self, device, stream_of(device))


@kept()
def _copies(of: Numbers, device: torch.device, stream: int) -> Tensor:
    return moved(of.host, device)


@kept()
def _few(values: tuple[int, ...]) -> Numbers:
    return Numbers(numbers(values, torch.int32))


def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A few integers on a device, int32; kept as `Numbers` are."""
    return _few(values).on(device)
