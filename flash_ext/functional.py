"""What people call: `flash_ext.attention` and `flash_ext.attention_varlen`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict, TypeVar, overload

import torch
from torch import Tensor
from torch.fx import Proxy
from typing_extensions import Unpack

from . import ops
from .mask import Mask
from .masked import with_bool_bias, with_mask, with_packed_mask
from .ops.checks import (
    Pair,
    refuse,
    refuse_gradients,
    require_dtype,
    require_number,
    require_pair,
    require_tensors,
    statistics_dtype,
)

_F = TypeVar("_F", bound=Callable[..., Any])


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `attention` and `attention_varlen`, except return_lse."""

    scale: float | None
    causal: bool
    window: Pair
    softcap: float
    alibi_slopes: Tensor | None
    bias: Tensor | None
    mask: Mask | None
    sink: Tensor | None
    seqused_k: Tensor | None
    dropout_p: float
    rng_state: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    v_transposed: bool
    out_dtype: torch.dtype | None
    deterministic: bool | None
    batch_invariant: bool
    variant: str


_ELSEWHERE = {
    "block_table": "page_table of attention_with_cache",
    "cache_seqlens": "an argument of attention_with_cache",
    "cu_seqlens_k": "an argument of attention_varlen",
    "cu_seqlens_q": "an argument of attention_varlen",
    "page_table": "an argument of attention_with_cache",
    "rotary_cos": "an argument of attention_with_cache",
    "attn_mask": "bias: added to the scores, or bool, True where a key is visible",
    "block_mask": "mask: flash_ext.Mask.from_block_mask makes one",
    "dropout": "dropout_p",
    "enable_gqa": "not needed: k and v may have fewer heads",
    "is_causal": "causal, aligned bottom-right where Sq and Sk differ",
    "key_padding_mask": "seqused_k, or packed sequences in attention_varlen",
    "max_seqlen_k": "not needed",
    "max_seqlen_q": "not needed",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "window_size": "window",
}
"""Names of arguments of SDPA, flash-attn and others: what they are here."""


def unknown_option(
    name: str, function: str = "attention", names: Iterable[str] = AttentionOptions.__annotations__
) -> TypeError:
    """The error of an option that a function does not have; it says what may be meant."""
    hint, names = "", list(names)
    here = _ELSEWHERE.get(name, "")
    if here and (function == "attention" or here.split()[0].rstrip(":,") in names):
        hint = f"; here it is {here}"
    elif close := difflib.get_close_matches(name, names, n=1):
        hint = f"; did you mean {close[0]!r}?"
    return TypeError(f"flash_ext: {function} got an unexpected keyword argument {name!r}{hint}")


def attention_options(
    q: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_transposed: bool = False,
    out_dtype: torch.dtype | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    variant: str = "auto",
    **unknown: object,
) -> dict[str, Any]:
    """The options of `attention` as the ops take them, without those that have the ops' defaults.

    Every option that is given costs time in the dispatcher, all of them more than the launch.
    A mask, which `flash_ext.masked` adds, is refused here.

    Raises:
        TypeError: an unknown one.
    """
    for name in unknown:
        raise unknown_option(name)
    if type(q) is not Tensor:
        require_tensors(q=q)
    options: dict[str, Any] = {}
    if scale is not None:
        if type(scale) is not float:
            require_number("scale", scale)
        options["scale"] = scale
    if causal is not False:
        options["causal"] = causal
    if type(window) is not tuple or window != (-1, -1):
        options["window_left"], options["window_right"] = require_pair("window", window)
    if type(softcap) is not float:
        require_number("softcap", softcap)
    if softcap != 0.0:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        require_tensors(alibi_slopes=alibi_slopes)
        refuse_gradients(alibi_slopes=alibi_slopes)
        options["alibi_slopes"] = alibi_slopes.to(statistics_dtype(q.dtype)).contiguous()
    if bias is not None:
        require_tensors(bias=bias)
        options["bias"] = bias if bias.dim() >= 4 else bias[(None,) * (4 - bias.dim())]
    if mask is not None:
        refuse("mask", "None here: attention and attention_varlen have it", "one")
    if sink is not None:
        require_tensors(sink=sink)
        options["sink"] = sink.to(statistics_dtype(q.dtype)).contiguous()
    if cu_seqlens_q is not None:
        options["cu_seqlens_q"] = cu_seqlens_q
    if cu_seqlens_k is not None:
        options["cu_seqlens_k"] = cu_seqlens_k
    if seqused_k is not None:
        options["seqused_k"] = seqused_k
    if type(dropout_p) is not float:
        require_number("dropout_p", dropout_p)
    if dropout_p != 0.0:
        options["dropout_p"] = dropout_p
        if rng_state is None:
            rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    if rng_state is not None:
        options["rng_state"] = rng_state
    if q_descale is not None:
        require_tensors(q_descale=q_descale)
        refuse_gradients(q_descale=q_descale)
        options["q_descale"] = q_descale.to(torch.float32)
    if k_descale is not None:
        require_tensors(k_descale=k_descale)
        refuse_gradients(k_descale=k_descale)
        options["k_descale"] = k_descale.to(torch.float32)
    if v_descale is not None:
        require_tensors(v_descale=v_descale)
        refuse_gradients(v_descale=v_descale)
        options["v_descale"] = v_descale.to(torch.float32)
    if v_transposed is not False:
        options["v_transposed"] = v_transposed
    if out_dtype is not None:
        options["out_dtype"] = require_dtype("out_dtype", out_dtype)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic is not False:
        options["deterministic"] = deterministic
    if batch_invariant is not False:
        options["batch_invariant"] = batch_invariant
    if variant != "auto":
        options["variant"] = variant
    return options


def with_options(names: Iterable[str], *known: Callable[..., Any]) -> Callable[[_F], _F]:
    """A decorator that lets `help` and `inspect.signature` show every option of a function, with
    its default, as in one of the functions `known`."""
    defaults = {name: x for f in known for name, x in inspect.signature(f).parameters.items()}

    def decorate(function: _F) -> _F:
        *own, _ = inspect.signature(function).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        more = [defaults[name].replace(name=name, kind=kind) for name in names]
        signature = inspect.Signature([*own, *more])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def recorded(function: Callable[..., Any], q: Proxy, *tensors: Any, **options: Any) -> Any:
    """A call as a node of the graph, while torch.fx traces it symbolically: a proxy has neither
    shape nor dtype, by which `attention_options` prepares options."""
    return q.tracer.create_proxy("call_function", function, (q, *tensors), options)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


@with_options(AttentionOptions.__annotations__, attention_options)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(S) V, in memory linear in the sequence length.

    The score of query i and key j is, where Sq and Sk are the lengths of their sequences,

        S_ij = c · tanh(τ q_i·k_j / c) − slope · |i + Sk − Sq − j| + bias_ij

    Differentiable in q, k, v, bias and sink, through out and through lse. All options can be
    combined, but for batch_invariant in fa1, and unless inputs have 8 bits (below). Sources: Dao et
    al., "FlashAttention" (2022), Algorithms 2 and 4 (variant "fa1"); Dao, "FlashAttention-2"
    (2023), Algorithms 1 and 2 (variant "fa2"); Shah et al., "FlashAttention-3" (2024), Algorithms 1
    to 3 (variant "fa3").

    The variant "fa3" runs only on Hopper GPUs (compute capability 9.0), with FP8 on a CPU too. It
    does not take a bias with D or Dv above 128 (float32: 64), seqused_k, a softcap, ALiBi or
    dropout; a softcap above 2048; or dropout with D or Dv above 128, a softcap or ALiBi, or above
    31/32 (float16: 0.5). A softcap of up to 64 is computed there with a relative error of 2^-11 at
    most. Rows that TMA cannot address are copied to aligned memory first: those that do not start
    and end on 16-byte boundaries (so D or Dv is no multiple of 8), or are one row expanded over the
    sequence (a row stride of 0). Where a tensor is empty, fa2's kernels compute the gradients:
    `flash_ext.explain` says which kernels do.

    8 bits: q, k and v in float8_e4m3fn are q_descale · q and so on, where quantization has divided
    them by the descales (FlashAttention-3 §3.3). q and k may also be int8, with v in float8_e4m3fn:
    the error of their scores is smaller (cf. Zhang et al., "SageAttention", 2024). Only "fa3" has
    them, and only forward, with rows on 16-byte boundaries (so D and Dv are multiples of 16), and
    without dropout, bias, softcap and ALiBi. P is rounded to float8_e4m3fn too, after a factor of
    2^8; softmax and sums are float32, and scores of int8 are exact. Descales are finite and not
    negative, which is not checked.

    k and v may have 8 bits beside a q of 16 (on CPU also more): both float8_e4m3fn, or both int8,
    with k_descale and v_descale. This is for decoding, which takes as long as reading k and v.
    Only "fa3" has it, only forward, with D and Dv multiples of 16, and without dropout and bias. k
    and v become float16, exactly, and P is rounded to it.

    Args:
        q: queries (B, Sq, Hq, D), float16, bfloat16, float8_e4m3fn or int8; on CPU also float32 and
            float64. D is 1 to 256. Any strides with a contiguous last dimension, as for k and v.
        k: keys (B, Sk, Hk, D), of q's dtype and device, as all tensors below unless they say
            otherwise; or of 8 bits. Hq is a multiple of Hk: query head h reads key head
            h // (Hq / Hk) (grouped-query attention).
        v: values (B, Sk, Hk, Dv); float8_e4m3fn where q is int8, otherwise of k's dtype. Dv is 1 to
            256 and may differ from D.
        scale: τ, the factor of the scores, below 2^127 in magnitude, and below 2^127 c with a
            softcap c; None is 1 / sqrt(D). Numbers may be tensors of one element, which a call
            waits for on CUDA; they get no gradient, and one that wants it is refused.
        causal: hide the keys after each query. Aligned bottom-right: the last query sees all keys.
        window: (left, right): query i sees keys i + Sk − Sq − left to i + Sk − Sq + right, both
            included; −1 is unlimited. causal is right = 0. Any two integers: a tuple, a list, a
            tensor, a NumPy array.
        softcap: c > 0 bounds the scaled scores to (−c, c) (Gemma 2 report, 2024); 0 does not. At
            least 2^−10 and below 2^127.
        alibi_slopes: (Hq) or (B, Hq): each head's penalty per position of distance (Press et al.,
            "Train short, test long", 2022). Constants: slopes that want a gradient are refused.
        bias: added to the scores. Broadcasts to (B, Hq, Sq, Sk), with any strides; q's dtype,
            float32, or bool: False hides the key, like −inf. Its gradient repeats bit by bit. A
            large bool bias on a GPU becomes a mask: once, while it lives and is not written to.
        mask: a `flash_ext.Mask` for (B or 1, Hq, Hk or 1, Sq, Sk). causal and window hide further
            keys, as always. fa2 has masks beside all options. Where a variant's kernels have none,
            or not beside the other options, it is a bool bias: `flash_ext.explain` says so.
        sink: (Hq), float32: a score per head that takes part in the softmax, as of a key that comes
            first and has value 0 (gpt-oss model card, 2025; cf. Xiao et al., "Efficient streaming
            language models with attention sinks", 2024).
        seqused_k: int32 (B): batch element b has only its first seqused_k[b] keys; Sk is this
            number then, wherever it appears. The others are never read. From 0 to the number of
            keys: on CUDA checked only with FLASH_EXT_DEBUG=1, as cu_seqlens of `attention_varlen`.
        dropout_p: the probability of dropping an entry of P after the softmax, in [0, 1).
        rng_state: int64 of shape (2,): seed and offset of the dropout mask
            (`flash_ext.dropout.keep_mask`). None draws them from torch's generator of q's device.
        q_descale: float32, of 8-bit q only; None is 1. One number (0-dim or (1,)); (B, Hk): of
            each batch element and key head; or (B, Hq, ⌈Sq / 128⌉): of blocks of 128 queries. Any
            strides. A constant: one that wants a gradient is refused.
        k_descale: the same, by blocks (B, Hk, ⌈Sk / 128⌉) of 128 keys.
        v_descale: the same, but by channels (B, Hk, Dv) in place of blocks.
        v_transposed: v, of 8 bits as q, is what `flash_ext.fp8.quantize(v, transposed=True)` makes:
            (B, Hk, Dv, keys). Calls with many queries are faster then, since they need no pass
            over v. The result is the same bit by bit.
        out_dtype: the dtype of out: with 8-bit inputs bfloat16 (None) or float16, otherwise q's.
        deterministic: gradients that repeat bit by bit. None follows
            `torch.are_deterministic_algorithms_enabled()`.
        batch_invariant: out and lse of a query have bits that depend on it and on the keys that it
            sees alone: whatever else is in the batch, however a prompt is cut into chunks, packed,
            dense or in pages. So training agrees with generation bit for bit, on the same kind of
            device and with the same variant, head dims and other options. "auto" is fa3 for pages
            of a multiple of 8 keys and without pages, if there is neither sink, softcap, ALiBi,
            bias nor dropout; else fa2. fa3 splits keys at fixed positions; fa2 does not, so long
            keys for few rows are slower there. Not with fa1 and 8 bits. On a CPU it is for tests:
            products are sums in order, and slow.
        variant: "fa1", "fa2", "fa3", or "auto" for the fastest that runs: fa3 if it can, fa2
            elsewhere (on a CPU with larger tiles than the paper's). 8-bit inputs have only fa3. It
            chooses without a warning: the result is as exact, and `flash_ext.explain` says what
            runs and why not the others. A named one runs or raises with the reason.
        return_lse: return lse too.

    alibi_slopes, sink and descales may be of any floating dtype: they are converted to float32
    (with float64 inputs, float64).

    Returns:
        out (B, Sq, Hq, Dv) in out_dtype, contiguous; with return_lse the pair (out, lse), where lse
        (B, Hq, Sq) is the natural logarithm of the softmax's denominator, in float32 (float64 for
        float64). A query that sees no key gives out = 0 and zero gradients; its lse is −inf, or the
        sink.

    Raises:
        ValueError, RuntimeError: an argument is wrong; the message names it, what was expected
            and what was given.

    Examples:
        >>> q = torch.randn(2, 8, 4, 16, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 8, 2, 16)  # two query heads for each key head
        >>> out, lse = flash_ext.attention(q, k, v, causal=True, return_lse=True)
        >>> out.sum().backward()
        >>> out.shape, lse.shape, q.grad.shape
        (torch.Size([2, 8, 4, 16]), torch.Size([2, 4, 8]), torch.Size([2, 8, 4, 16]))
    """
    if isinstance(q, Proxy):
        return recorded(attention, q, k, v, return_lse=return_lse, **options)
    mask, bias = options.pop("mask", None), options.get("bias")
    if "cu_seqlens_q" in options or "cu_seqlens_k" in options:
        raise unknown_option(next(x for x in options if x.startswith("cu_seqlens")))
    given = attention_options(q, **options)
    if mask is not None:
        given = with_mask(q, k, v, mask, given)
    elif bias is not None and bias.dtype == torch.bool:
        given = with_bool_bias(q, k, v, bias, given)
    out, lse = ops.forward(q, k, v, need_lse=return_lse, **given)
    return (out, lse) if return_lse else out


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


@with_options(AttentionOptions.__annotations__, attention_options)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of B sequences of any lengths, packed one after the other.

    No maximum length is needed and nothing waits for the device.

    Args:
        q: (total_q, Hq, D), as for `attention`.
        k, v: (total_k, Hk, D) and (total_k, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1) on q's device, contiguous: sequence b has the rows
            cu_seqlens[b] to cu_seqlens[b + 1] − 1 of q, and of k and v. They start with 0 and never
            decrease; a sequence may be empty on either side. On CUDA they are checked only with
            FLASH_EXT_DEBUG=1 in the environment, which waits for the device.
        bias: (B or 1, Hq or 1, Lq or 1, Lk or 1), indexed by positions within the sequence.
            Positions that an Lq or Lk other than 1 does not reach are hidden.
        seqused_k: int32 (B): sequence b has only the first seqused_k[b] of its keys.
        mask: a `flash_ext.Mask` over all rows, (1, Hq, Hk or 1, total_q, total_k), of which each
            sequence has its own part. Not beside bias, alibi_slopes, dropout_p, seqused_k and
            descales. Rows that belong to no sequence must be finite then.
        q_descale, k_descale: blocks count from the first row of each sequence, and are as many as
            the longest one has, or more: on CUDA checked only with FLASH_EXT_DEBUG=1.

    The variants, the other options and the errors are as in `attention`. In the dropout
    mask a sequence is a batch element, and rows and columns are positions within the sequence.

    Returns:
        out (total_q, Hq, Dv), or with return_lse (out, lse), lse (Hq, total_q). In rows that belong
        to no sequence out = 0, lse = −inf, and gradients are 0.

    Examples:
        >>> q, k, v = torch.randn(3, 8, 4, 16)  # sequences of 3 and 5 tokens
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True).shape
        torch.Size([8, 4, 16])
    """
    if isinstance(q, Proxy):
        packed = (k, v, cu_seqlens_q, cu_seqlens_k)
        return recorded(attention_varlen, q, *packed, return_lse=return_lse, **options)
    if cu_seqlens_q is None or cu_seqlens_k is None:  # as if the call was dense
        require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    mask = options.pop("mask", None)
    given = attention_options(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    if mask is not None:
        q, k, v, given = with_packed_mask(q, k, v, mask, given)
    out, lse = ops.forward(q, k, v, need_lse=return_lse, **given)
    if mask is not None:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out
