"""The threads of an FA3 kernel on the host (tests/native/barriers.cpp), for barrier_model.py."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from functools import cache

from barrier_model import Event, Noted
from compiled import DEVICE_CODE, FAKE_CUDA, NATIVE, shared_library

SOURCE = NATIVE / "barriers.cpp"
KERNELS = re.findall(r'^    \{"(.+)", ', SOURCE.read_text(), re.MULTILINE)
SEQUENCES = 7


class Call(ctypes.Structure):
    """A call of a kernel: lengths, and the options that change the order of its steps."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                *("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k"),
                *("window_left", "window_right", "num_splits", "pack_gqa_log2"),
                *("deterministic", "varlen", "split_ctas"),
            )
        ),
        ("cu_seqlens_q", ctypes.c_int * (SEQUENCES + 1)),
        ("cu_seqlens_k", ctypes.c_int * (SEQUENCES + 1)),
    )


@cache
def library() -> ctypes.CDLL:
    path = shared_library(
        "flash_ext_barriers",
        [SOURCE, FAKE_CUDA / "device.cpp", FAKE_CUDA / "threads.cpp"],
        [
            *(*DEVICE_CODE, "-D__CUDA_ARCH_FEAT_SM90_ALL"),
            *("-fvisibility=default", "-fsanitize=thread", "-fno-threadsafe-statics"),
            *("-Wno-invalid-offsetof", "-Wno-unused-variable"),
            # Not libtsan: threads.cpp has what the compiler calls.
            *("-nodefaultlibs", "-lstdc++", "-lm", "-lgcc_s", "-lc"),
        ],
    )
    found = ctypes.CDLL(str(path))
    found.members.restype = ctypes.c_char_p
    return found


class Kernel:
    """A kernel's first CTA. Another one must not begin before its threads have ended."""

    def __init__(self, name: str, call: Call) -> None:
        self.threads = library().start(name.encode(), ctypes.byref(call))
        assert self.threads > 0, "nothing was launched"
        self.barriers: dict[int, str] = {}
        self.memory: list[tuple[int, int, str]] = []
        for line in library().members().decode().splitlines():
            kind, address, size, member = line.split(" ", 3)
            begin, end = int(address), int(address) + int(size)
            for i, barrier in enumerate(range(begin, end, 8)):
                if kind == "pipeline":
                    self.barriers[barrier] = f"{'empty' if i % 2 else 'full'}({member})[{i // 2}]"
                elif kind == "barrier":
                    self.barriers[barrier] = f"{member}[{i}]"
            if kind == "data":
                self.memory.append((begin, end, member))

    def events(self) -> Sequence[Iterator[Noted]]:
        return [self.events_of(thread) for thread in range(self.threads)]

    @staticmethod
    def events_of(thread: int) -> Iterator[Noted]:
        found = ctypes.POINTER(ctypes.c_uint64)()
        while True:
            count = library().resume(thread, ctypes.byref(found))
            numbers = found[: 6 * count]
            for i in range(0, len(numbers), 6):
                if numbers[i] == Event.End:
                    return
                yield tuple(numbers[i : i + 6])
