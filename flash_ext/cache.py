"""Attention to a cache of keys and values, for text that is generated token by token.

`flash_ext.attention_with_cache` writes new keys and values into the cache, rotated by their
positions, and attends to it. `flash_ext.attention_with_shared_prefix` attends also to a prefix that
all sequences share, and reads it once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import Proxy
from typing_extensions import Unpack

from . import ops
from .cache_call import CacheCall, Keys
from .functional import attention_options, recorded, unknown_option, with_options
from .ops.call import can_be_read, no_autocast
from .ops.checks import Pair, check_rows, refuse, refuse_gradients, require_ints
from .ops.torch_private import in_dual_level


class _CacheTensors(TypedDict, total=False):
    cache_seqlens: int | Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    cu_seqlens_q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: Tensor | None


class _PlainOptions(TypedDict, total=False):
    scale: float | None
    causal: bool
    softcap: float
    sink: Tensor | None
    variant: str


class CacheArguments(_CacheTensors, _PlainOptions, total=False):
    """The keyword arguments of `attention_with_cache`, except return_lse."""

    window: Pair
    alibi_slopes: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_dtype: torch.dtype | None
    batch_invariant: bool


class PrefixArguments(_CacheTensors, _PlainOptions, total=False):
    """The same of `attention_with_shared_prefix`, without the prefix: no distances between
    positions, no 8 bits."""


def _call_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    arguments: Mapping[str, Any],
    function: str,
    names: Iterable[str],
) -> tuple[CacheCall, dict[str, Any]]:
    """The call, and its options. Raises TypeError for a name that the function does not have."""
    for name in arguments:
        if name not in names:
            raise unknown_option(name, function, names)
    of_call = {name: x for name, x in arguments.items() if name in CacheCall._fields}
    options = {name: x for name, x in arguments.items() if name not in of_call}
    caches: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    others = ("k", "v", "rotary_cos", "rotary_sin", "sink", "alibi_slopes")
    tensors = caches | {name: arguments.get(name) for name in others}
    wants = any(isinstance(x, Tensor) and x.requires_grad for x in tensors.values())
    if wants or (not is_compiling() and in_dual_level()):
        refuse_gradients(**tensors)
    return CacheCall(**caches, **of_call), options


def _run(
    call: CacheCall, options: Mapping[str, Any], need_lse: bool
) -> tuple[Tensor, Keys, Tensor, Tensor]:
    """Of a checked call: write and attend. q as it was rotated, the keys that it has seen, out and
    lse."""
    lengths = call.lengths()
    keys = call.keys(lengths)
    options = call.with_descales_of_heads(options)
    k_descale = options.get("k_descale")
    if call.cache_leftpad is not None and k_descale is not None and k_descale.dim() == 3:
        refuse("k_descale", "one number, (Hk) or (B, Hk) with cache_leftpad", "one of blocks")
    with no_autocast(call.q):
        given = attention_options(call.q, cu_seqlens_q=call.cu_seqlens_q, **options)
        given |= keys.options()
        if call.k is not None and not is_compiling() and ops.is_real(call.q):
            # Where the device can be read. A refusal comes before anything is written.
            ops.check(call.q, keys.k, keys.v, **given)
        q, used = call.append(lengths, given)
        if call.k is not None:
            # With padding again: pages of one key may be a copy.
            again = call.cache_leftpad is not None
            keys = call.keys(used) if again else keys._replace(seqused_k=used)
            given |= keys.options()
        return q, keys, *ops.forward(q, keys.k, keys.v, need_lse=need_lse, **given)


def run_with_cache(
    call: CacheCall, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor, int | Tensor]:
    """`attention_with_cache` of a checked call, for the functions of flash-attn: out, lse, and how
    many keys the sequences have: of all, or (B)."""
    _, keys, out, lse = _run(call, options, need_lse=True)
    return out, lse, call.capacity if keys.seqused_k is None else keys.seqused_k


@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[False] = False,
    **arguments: Unpack[CacheArguments],
) -> Tensor: ...


@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[True],
    **arguments: Unpack[CacheArguments],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: bool,
    **arguments: Unpack[CacheArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...


@with_options(CacheArguments.__annotations__, attention_options, CacheCall)
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: bool = False,
    **arguments: Unpack[CacheArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` to a cache of keys and values, into which new ones are written first.

    Lengths, tables and positions stay on the device, so a CUDA graph can be replayed with others,
    and `torch.compile` finds no break. There are no gradients. `flash_ext.explain` says which
    variant runs: `explain(q, k_cache, v_cache, page_table=page_table, seqused_k=cache_seqlens)`.

    All arguments are checked before anything is written; compiled, each op checks its own. On CUDA
    numbers in tensors are not read: a new key whose place is not in the cache is not written, and
    tables are never followed outside of it.

    Args:
        q: queries (B, Sq, Hq, D), or with cu_seqlens_q packed, (total_q, Hq, D).
        k_cache, v_cache: (Bc, Sc, Hk, D) and (Bc, Sc, Hk, Dv), Bc at least B: the first B elements
            are used. With page_table (pages, page size, Hk, D) and (…, Dv), of any page size. Of
            q's dtype, or both float8_e4m3fn, or both int8.
        cache_seqlens: how many keys each sequence has in the cache: an int, or int32 (B). None is
            all that it can have, without k.
        page_table: int32 (B, pages of a sequence): the pages of each sequence, in order. Entries
            past its keys may hold anything, for example -1.
        cache_batch_idx: int32 (B): the batch element, or row of page_table, of each sequence.
        cache_leftpad: int32 (B): how many of its first keys a sequence does not see. Its keys are
            then read as pages of one key; a dense cache with gaps in memory is copied for this.
        cu_seqlens_q: int32 (B + 1), as of `attention_varlen`.
        k, v: the new keys and values, (B, S_new, Hk, D) and (…, Dv), of the caches' dtypes; with
            cu_seqlens_k_new, int32 (B + 1), packed. They are written after the first cache_seqlens
            keys, and q sees them. For caches of 8 bits they may be of q's dtype, and are divided by
            k_descale and v_descale, rounded to the nearest, and saturated.
        rotary_cos, rotary_sin: (positions, R / 2), float32 or of q's dtype, with R ≤ D: the first R
            columns of k and q are rotated by their positions (Su et al., "RoFormer", 2021). New key
            i has position cache_seqlens + i. With causal or a window so has query i; otherwise all
            queries have position cache_seqlens. A position without an angle gives NaN. Only with k.
        rotary_interleaved: rotate columns 2i and 2i + 1 together. False: i and i + R / 2.
        rotary_seqlens: int32 (B): the positions of the first rows, in place of cache_seqlens.
        return_lse: return lse too.

    The other options are as in `attention`. Sk is the number of keys that a sequence sees: causal
    and windows are aligned with its last key, after the new ones were written. k_descale and
    v_descale of caches of 8 bits may also be (Hk). Blocks of 128 keys that have a descale each are
    blocks of a sequence's keys, as many as it has room for, wherever their pages lie. Queries to
    caches of 8 bits run in tiles for few queries: long prompts are faster with k and v themselves.

    Returns:
        out (B, Sq, Hq, Dv), or packed (total_q, Hq, Dv); with return_lse (out, lse), as
        `attention` and `attention_varlen` return them.

    Raises:
        ValueError, RuntimeError: an argument is wrong.
        TypeError: an option that it does not have.

    Examples:
        >>> k_cache, v_cache = torch.zeros(2, 6, 16, 4, 16)  # 6 pages of 16 keys
        >>> page_table = torch.tensor([[5, 1], [0, -1]], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 7], dtype=torch.int32)
        >>> angles = torch.arange(32.0)[:, None] / 10 ** torch.arange(8)
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)  # a new token each
        >>> out = flash_ext.attention_with_cache(
        ...     q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, page_table=page_table,
        ...     rotary_cos=angles.cos(), rotary_sin=angles.sin(), causal=True,
        ... )
        >>> out.shape, torch.equal(v_cache[[1, 0], [4, 7]], v[:, 0])
        (torch.Size([2, 1, 4, 16]), True)
    """
    if isinstance(q, Proxy):
        caches = (k_cache, v_cache)
        return recorded(attention_with_cache, q, *caches, return_lse=return_lse, **arguments)
    names = CacheArguments.__annotations__
    call, options = _call_of(q, k_cache, v_cache, arguments, "attention_with_cache", names)
    call.check()
    _, _, out, lse = _run(call, options, need_lse=return_lse)
    return (out, lse) if return_lse else out


def _prefix_keys(
    call: CacheCall,
    k_prefix: Tensor,
    v_prefix: Tensor,
    prefix_seqlen: int | Tensor | None,
    prefix_page_table: Tensor | None,
) -> tuple[Keys, Tensor]:
    """The prefix as the keys of one sequence, and its length (1)."""
    q, table = call.q, prefix_page_table
    rows: tuple[int | str, ...] = ("seqlen",)
    if table is not None:
        require_ints("prefix_page_table", table, ("pages",), q)
        rows = ("pages", "page_size")
    check_rows("k_prefix", k_prefix, (*rows, call.k_cache.shape[2], q.shape[-1]), q)
    check_rows("v_prefix", v_prefix, (*k_prefix.shape[:-1], call.v_cache.shape[3]), q)
    longest = k_prefix.shape[0] if table is None else table.shape[0] * k_prefix.shape[1]
    if isinstance(prefix_seqlen, Tensor):
        require_ints("prefix_seqlen", prefix_seqlen, (1,), q)
        length = prefix_seqlen.contiguous()
        found = int(length) if can_be_read(length) else 0
    else:
        found = longest if prefix_seqlen is None else prefix_seqlen
        if not hasattr(found, "__index__"):
            refuse("prefix_seqlen", "an int or int32 (1)", found)
        length = torch.full((1,), found, dtype=torch.int32, device=q.device)
    if not 0 <= found <= longest:
        refuse("prefix_seqlen", f"0 to {longest}", found)
    if table is None:
        return Keys(k_prefix[None], v_prefix[None], None, length), length
    return Keys(k_prefix, v_prefix, table.contiguous()[None], length), length


@overload
def attention_with_shared_prefix(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_seqlen: int | Tensor | None = None,
    prefix_page_table: Tensor | None = None,
    return_lse: Literal[False] = False,
    **arguments: Unpack[PrefixArguments],
) -> Tensor: ...


@overload
def attention_with_shared_prefix(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_seqlen: int | Tensor | None = None,
    prefix_page_table: Tensor | None = None,
    return_lse: Literal[True],
    **arguments: Unpack[PrefixArguments],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_with_shared_prefix(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_seqlen: int | Tensor | None = None,
    prefix_page_table: Tensor | None = None,
    return_lse: bool,
    **arguments: Unpack[PrefixArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...


@with_options(PrefixArguments.__annotations__, attention_options, CacheCall)
def attention_with_shared_prefix(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_seqlen: int | Tensor | None = None,
    prefix_page_table: Tensor | None = None,
    return_lse: bool = False,
    **arguments: Unpack[PrefixArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_with_cache` of sequences that begin with the same keys, for example a prompt.

    The prefix is held and read once for all: all queries attend to it as to one sequence, then each
    to its own keys, and both results are merged by lse (Juravsky et al., "Hydragen", 2024).

    Args:
        q: (B, Sq, Hq, D), or with cu_seqlens_q packed. Every query sees the whole prefix.
        k_prefix, v_prefix: (P, Hk, D) and (P, Hk, Dv), of q's dtype; or with prefix_page_table
            pages, (pages, page size, Hk, D) and (…, Dv), perhaps in the memory of the caches.
        k_cache, v_cache: the keys after the prefix, as of `attention_with_cache`.
        prefix_seqlen: how many keys the prefix has: an int, or int32 (1). None is all.
        prefix_page_table: int32 (pages of the prefix).

    The rest is as of `attention_with_cache`, where cache_seqlens and the new keys count from the
    end of the prefix. Positions count from its start, so unless rotary_seqlens is given it is
    cache_seqlens and the prefix's length. Both results are rounded to q's dtype before the merge.

    Returns:
        out, or with return_lse (out, lse), as `attention_with_cache` returns them. Rows of packed
        queries that belong to no sequence see the prefix alone.

    Examples:
        >>> k_prefix, v_prefix = torch.randn(2, 100, 4, 16)  # 100 keys, for both sequences
        >>> k_cache, v_cache = torch.randn(2, 2, 32, 4, 16)
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)
        >>> flash_ext.attention_with_shared_prefix(
        ...     q, k_prefix, v_prefix, k_cache, v_cache, k=k, v=v, cache_seqlens=7
        ... ).shape
        torch.Size([2, 1, 4, 16])
    """
    refuse_gradients(k_prefix=k_prefix, v_prefix=v_prefix)
    function, names = "attention_with_shared_prefix", PrefixArguments.__annotations__
    call, options = _call_of(q, k_cache, v_cache, arguments, function, names)
    call.check()
    prefix, length = _prefix_keys(call, k_prefix, v_prefix, prefix_seqlen, prefix_page_table)
    if call.rotary_cos is not None and call.rotary_seqlens is None:
        begins = length + (0 if call.cache_seqlens is None else call.cache_seqlens)
        call = call._replace(rotary_seqlens=begins.expand(call.batch).contiguous())
    of_prefix = {name: x for name, x in options.items() if name not in ("causal", "sink")}
    with no_autocast(q):
        given = attention_options(q, **of_prefix) | prefix.options()
        flat = q if q.dim() == 3 else q.flatten(0, 1)
        if call.k is not None and not is_compiling() and ops.is_real(q):
            ops.check(flat[None], prefix.k, prefix.v, **given)  # before anything is written
        q, _, own, own_lse = _run(call, options, need_lse=True)
        flat = q if q.dim() == 3 else q.flatten(0, 1)
        shared, shared_lse = ops.forward(flat[None], prefix.k, prefix.v, **given)
    if q.dim() == 3:
        own, own_lse = own[None], own_lse[None]
    else:
        shared = shared.unflatten(1, q.shape[:2])[0]
        shared_lse = shared_lse[0].unflatten(1, q.shape[:2]).transpose(0, 1)
    out, lse = torch.empty_like(own), torch.empty_like(own_lse)
    ops.combine_parts(out, lse, [shared, own], [shared_lse, own_lse], [0, 0])
    if q.dim() == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out
