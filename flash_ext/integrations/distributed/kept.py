"""What calls keep for later ones: caches that are bounded in bytes.

Packed documents change with every step of a training, and what was planned for them is of use for
all layers of a step, and then never again. So a cache keeps the newest results, up to so many bytes
of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from threading import Lock
from typing import Any, Generic, TypeVar

from ...ops.torch_private import ordinary_tensors

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
        self._lock = Lock()  # backward passes are on threads of their own

    def __call__(self, *arguments: Any) -> T:
        """The result; not a copy, so nobody writes to it."""
        with self._lock:
            found = self._results.get(arguments)
            if found is not None:
                self._results.move_to_end(arguments)
                return found[0]
        with ordinary_tensors():
            result = self.function(*arguments)
        size = A_RESULT + bytes_of(arguments) + bytes_of(result)
        with self._lock:
            self.nbytes += size - self._results.pop(arguments, (None, 0))[1]
            self._results[arguments] = result, size
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
