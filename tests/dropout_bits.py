"""The dropout mask's bits, one number at a time: the contract in plain Python.

Independent of flash_ext.dropout, which works on whole tensors, and of csrc/problem/dropout.cuh.
"""

from __future__ import annotations


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...], rounds: int = 7) -> tuple[int, ...]:
    """Philox4x32, one number at a time (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def is_kept(seed: int, offset: int, p: float, flat_head: int, i: int, j: int) -> bool:
    """Whether dropout keeps element (i, j) of head b * Hq + h: the contract, element by element."""
    seed, offset = seed % 2**64, offset % 2**64
    key = (seed % 2**32, (seed >> 32) ^ (offset >> 32))
    counter = (j // 32 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, flat_head, offset % 2**32)
    word = philox4x32(counter, key)[j // 16 % 2 * 2 + j % 2]
    bits = 8 * (i // 8 % 2 * 2 + j // 8 % 2) + 1
    number = (word << bits | word >> (32 - bits)) % 2**32 >> 17
    return number >= min(round(p * 2**15), 2**15 - 1)
