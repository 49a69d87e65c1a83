"""Which bytes of shared memory wgmma and TMA access: a model, from the PTX ISA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

PITCH = {0: 16, 1: 128, 2: 64, 3: 32}
"""By a descriptor's swizzle mode: the bytes of a row of a swizzle atom, without swizzle 16."""


def swizzled(address: int, pitch: int) -> int:
    """Bits 4 and up to 6 are changed by those that are three higher."""
    return address ^ (address >> 3 & (pitch - 1) & ~15)


def matmul_address(descriptor: int, mn_major: bool, mn: int, byte: int) -> int:
    """Where row or column `mn` of a wgmma operand has the 16 bytes at `byte` along K.

    With `mn_major`, of 16-bit elements: where it has the element at row byte / 2 of K.
    """
    start, leading, stride = (16 * (descriptor >> bit & 0x3FFF) for bit in (0, 16, 32))
    assert descriptor >> 49 & 7 == 0, "a base offset"
    pitch = PITCH[descriptor >> 62]
    if mn_major:
        k, columns = byte // 2, pitch // 2
        address = start + mn // columns * leading + k // 8 * stride + k % 8 * pitch
        return swizzled(address + mn % columns * 2, pitch)
    address = start + mn // 8 * stride + mn % 8 * pitch
    address += byte if pitch > 16 else byte // 16 * leading + byte % 16
    return swizzled(address, pitch)


@cache
def matmul_chunks(descriptor: int, rows: int, mn_major: bool) -> frozenset[int]:
    """The numbers of the 16-byte chunks that a wgmma reads, whose K has 32 bytes."""
    steps = range(0, 32, 2) if mn_major else (0, 16)
    chunks = range(0, rows, 8) if mn_major else range(rows)
    return frozenset(
        matmul_address(descriptor, mn_major, mn, byte) // 16 for mn in chunks for byte in steps
    )


def box_addresses(shared: int, pitch: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """(row, byte, address) of each 16 bytes of a box that TMA stores with a swizzle of `pitch`."""
    for row in range(rows):
        for byte in range(0, pitch, 16):
            yield row, byte, swizzled(shared + row * pitch + byte, pitch)
