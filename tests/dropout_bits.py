"""The dropout mask's bits, one number at a time: the contract in plain Python.

Independent of flash_ext.dropout, which works on whole tensors, and of csrc/problem/dropout.cuh.
"""

from __future__ import annotations


def word(key: int, place: int) -> int:
    """The hash of a place with a key of 64 bits."""
    x = place % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D + (key >> 32)
    x %= 2**32
    x = (x ^ x >> 15) * 0x846CA68B + key
    x %= 2**32
    return x ^ x >> 16


def is_kept(seed: int, offset: int, p: float, flat_head: int, i: int, j: int) -> bool:
    """Whether dropout keeps element (i, j) of head b * Hq + h: the contract, element by element."""
    key = seed * 0xBF58476D1CE4E5B9 + offset * 0x9E3779B97F4A7C15 + flat_head * 0xD1B54A32D192ED03
    key %= 2**64
    row, column = i // 16 * 8 + i % 8, j // 16 * 8 + j % 8
    bits = word(key, key + 0x9E3779B1 * (row * 0x9E3779B9 + column))
    left = 8 * (i // 8 % 2 * 2 + j // 8 % 2) + 1
    number = (bits << left | bits >> (32 - left)) % 2**32 >> 17
    return number >= min(round(p * 2**15), 2**15 - 1)
