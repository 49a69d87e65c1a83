"""Attention in 8 bits from bfloat16 and float16: quantization, and calls that do all of it.

    out = flash_ext.fp8.attention(q, k, v, causal=True)  # quantizes q, k and v, then attends

Or step by step, for example to quantize k and v once for many calls:

    signs = flash_ext.fp8.random_signs(q.shape[-1], device=q.device)
    q8, q_descale = flash_ext.fp8.quantize(q, torch.int8, signs=signs)
    k8, k_descale = flash_ext.fp8.quantize(
        k, torch.int8, signs=signs, mean=flash_ext.fp8.token_mean(k)
    )
    v8, v_descale = flash_ext.fp8.quantize(v, scales="channel", transposed=True)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out = flash_ext.attention(q8, k8, v8, v_transposed=True, **descales)

Three things keep the error small. *Scales* of few elements leave an outlier few neighbors to spoil.
A *rotation* of q and k, by random signs and a Hadamard matrix, spreads an outlier over its row and
leaves all products q·k as they are (incoherent processing; Shah et al., "FlashAttention-3", 2024,
section 3.3). The *mean* over tokens of k, which is large in many models, is subtracted: it changes
all scores of a query by the same number, which the softmax does not see (Zhang et al.,
"SageAttention", 2024).

v is in FP8 (e4m3), q and k are in FP8 or int8. Once rotated, their elements are nearly normal: then
int8, whose steps are all alike, has a smaller error than e4m3, at the same speed of the tensor
cores. So `attention` takes int8 unless it is told otherwise. (So does SageAttention.)

`quantize` passes no gradient. `attention` and `attention_varlen` are differentiable: the backward
pass is the one of the inputs' dtype, with out and lse of the 8-bit forward pass. So there is no
second forward pass, and gradients have errors like out's. It also subtracts the mean of k:
with out of another pass the rows of dS do not add up to what they should, and dQ = dS K would have
as much of the mean.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import Proxy
from typing_extensions import Unpack

from . import functional
from .functional import (
    AttentionOptions,
    attention_options,
    recorded,
    unknown_option,
    with_options,
)
from .ops.autograd import as_kernels_take, autocast_tensors, refuse_tangents, save, saved
from .ops.call import is_real
from .ops.checks import refuse, require_dtype, require_number, require_tensors
from .ops.options import QK_8_BITS
from .ops.quantize import (
    SCALE_ROWS,
    check_scales,
    fp8_quantize,
    fp8_quantize_qkv,
    fp8_token_mean,
)
from .ops.schemas import bwd
from .ops.torch_private import in_dual_level, in_transforms

__all__ = ["attention", "attention_varlen", "quantize", "random_signs", "token_mean"]

# The mean that `attention` subtracts from k is taken of this number of keys, or more. (Any vector
# would do: it changes results by rounding alone.) To read all keys takes as long as to quantize
# them.
MEAN_ROWS = 512


def random_signs(
    dim: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Random signs for `quantize`: int8 (dim), 1 or -1.

    Args:
        dim: the head dimension D.
        generator: where they are drawn from; None: torch's generator of the device.
        device: of the tensor.

    Examples:
        >>> flash_ext.fp8.random_signs(16).abs().sum()
        tensor(16)
    """
    bits = torch.randint(0, 2, (dim,), generator=generator, device=device, dtype=torch.int8)
    return 1 - 2 * bits


def token_mean(
    x: Tensor, *, cu_seqlens: Tensor | None = None, seqused: Tensor | None = None
) -> Tensor:
    """The mean over the tokens of each sequence and head: float32 (B, H, D), for `quantize`.

    No gradient passes, as in `quantize`.

    Args:
        x: (B, S, H, D) or packed (total, H, D), float16 or bfloat16.
        cu_seqlens: int32 (B + 1), of packed sequences.
        seqused: int32 (B): how many rows of each sequence count. The mean of none is 0.

    Examples:
        >>> k = torch.randn(2, 8, 4, 16, dtype=torch.bfloat16)
        >>> mean = flash_ext.fp8.token_mean(k)
        >>> torch.allclose(mean, k.float().mean(1), atol=1e-3)
        True
    """
    require_tensors(x=x)
    return fp8_token_mean(x.detach(), cu_seqlens=cu_seqlens, seqused=seqused)  # type: ignore[no-any-return]


def _blocks(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> int:
    """How many blocks of rows a head has, or the longest of packed sequences."""
    longest = x.shape[1] if cu_seqlens is None and x.dim() == 4 else x.shape[0]
    if cu_seqlens is not None and max_seqlen is not None:
        longest = max_seqlen
    return (longest + SCALE_ROWS - 1) // SCALE_ROWS


def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scales: str = "block",
    signs: Tensor | None = None,
    mean: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    max_seqlen: int | None = None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """x in 8 bits and its scales: x - mean, rotated, is x_8bit * descale up to rounding.

    A scale is the largest magnitude of what shares it, divided by 448, the largest number of e4m3,
    or by 127, int8's; 1 where all of it is 0. It may be subnormal: no finite number of
    bfloat16 is too small or too large. In e4m3 numbers that are not finite become NaN, and have no
    part in scales. int8 has no NaN: there the scale becomes NaN, and all that shares it. No
    gradient passes. On CUDA the GPU is a Hopper GPU, and D a multiple of 16.

    Args:
        x: (B, S, H, D), or packed (total, H, D); float16 or bfloat16, any strides with a contiguous
            last dimension. D up to 256.
        dtype: of the result, float8_e4m3fn, or int8 for q and k with scales="block".
        scales: what shares a scale, with the shape of descale: "tensor", (); "head", (B, H);
            "block", 128 rows of a head, (B, H, ceil(S / 128)); "channel", a column of a head,
            (B, H, D). `flash_ext.attention` takes blocks for q and k, channels for v, the others
            for all. (With "head" its q_descale has the number of k's heads: for grouped-query
            attention take blocks.)
        signs: int8 (D) from `random_signs`: rotate each row, x -> x diag(signs) H with an
            orthonormal Hadamard matrix H. Where D is no power of two H is block-diagonal, with
            blocks of the largest power of two that divides D. q and k need the same signs. Not with
            scales="channel".
        mean: float32 (B, H, D), contiguous, subtracted first: `token_mean(k)` for k, never for q
            nor with scales="channel".
        cu_seqlens: int32 (B + 1), of packed sequences. Blocks count from each sequence's first row.
        seqused: int32 (B): how many rows of each sequence are in use. The others, and rows of
            no sequence, are not read and become 0.
        max_seqlen: of packed sequences with scales="block", no less than their longest: the last
            dimension of descale is ceil(max_seqlen / 128). None takes the number of all rows.

        transposed: of v, with the keys of a channel side by side, for the option `v_transposed` of
            `flash_ext.attention`: (B, H, D, keys), packed (H, D, keys), as
            `flash_ext.cpu.transposed_v` describes. It costs no more, and spares the kernels a pass.
            Not with scales="block", signs or mean.

    Returns:
        x_8bit in dtype, contiguous, of x's shape unless transposed; descale, float32, contiguous.

    Examples:
        >>> x = torch.randn(2, 200, 4, 16, dtype=torch.bfloat16)
        >>> x_8bit, descale = flash_ext.fp8.quantize(x)
        >>> x_8bit.dtype, descale.shape  # two blocks of rows
        (torch.float8_e4m3fn, torch.Size([2, 4, 2]))
    """
    require_tensors(x=x)
    check_scales(scales)
    require_dtype("dtype", dtype)
    return fp8_quantize(  # type: ignore[no-any-return]
        x.detach(),
        scales,
        signs=signs,
        mean=None if mean is None else mean.detach(),
        cu_seqlens=cu_seqlens,
        seqused=seqused,
        blocks=_blocks(x, cu_seqlens, max_seqlen) if scales == "block" else 0,
        dtype=dtype,
        transposed=transposed,
    )


_LOW32 = 0xFFFFFFFF
_known_signs: dict[tuple[int, int, torch.device, int], Tensor] = {}
_MOST_SIGNS = 256


def _make_signs(dim: int, seed: int, device: torch.device) -> Tensor:
    """Signs as a pure function of (seed, column): a 32-bit hash in int64, which wraps around."""
    x = (torch.arange(dim, device=device) + ((seed + 1) * 0x9E3779B1 & _LOW32)) & _LOW32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _LOW32
    return (1 - 2 * ((x ^ (x >> 16)) & 1)).to(torch.int8)


def _seeded_signs(dim: int, seed: int, x: Tensor) -> Tensor:
    """The signs of a seed on x's device, kept from call to call if that is safe.

    A tensor made while a CUDA graph is captured has its values only when that is replayed; one made
    within a transform of torch.func is a wrapper that dies with it.
    """
    capturing = x.is_cuda and not is_compiling() and torch.cuda.is_current_stream_capturing()
    if is_compiling() or capturing or in_transforms() or not is_real(x):
        return _make_signs(dim, seed, x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    key = (dim, seed, x.device, stream)  # on another stream they may not be there yet
    known = _known_signs.get(key)
    if known is None:
        if len(_known_signs) >= _MOST_SIGNS:
            _known_signs.clear()
        with torch.inference_mode(False):
            known = _known_signs[key] = _make_signs(dim, seed, x.device)
    return known


def _refuse_option(name: str, why: str) -> NoReturn:
    raise ValueError(f"flash_ext: 8-bit attention has no {name}: {why}")


_KNOWN_OPTIONS = frozenset(AttentionOptions.__annotations__)
_NEVER_GIVEN = {
    "bias": "no variant that accepts 8-bit inputs has one",
    "alibi_slopes": "no variant that accepts 8-bit inputs has ALiBi",
    "mask": "no variant that accepts 8-bit inputs has one",
    "rng_state": "no variant that accepts 8-bit inputs has dropout",
    "q_descale": "quantization makes it",
    "k_descale": "quantization makes it",
    "v_descale": "quantization makes it",
    "v_transposed": "quantization makes it so",
}
"""Options of `flash_ext.attention` that are refused, and why."""


def _check(tensors: dict[str, Tensor], packed: bool, options: dict[str, Any]) -> None:
    """Refuse what quantization would refuse by other names."""
    q, rank = tensors["q"], 3 if packed else 4
    for name, x in tensors.items():
        if hasattr(x, "device_mesh"):
            refuse(name, "a plain tensor (flash_ext.attention accepts DTensors)", "a DTensor")
        if x.dim() != rank:
            shape = "(total, heads, D)" if packed else "(batch, seqlen, heads, D)"
            refuse(name, f"of shape {shape}", tuple(x.shape))
        if x.stride(-1) != 1:
            refuse(name, "contiguous in its last dimension", f"strides {x.stride()}")
        if name == "k" and x.shape[-1] != q.shape[-1]:
            refuse(name, f"of q's head dim {q.shape[-1]}", x.shape[-1])
        if name == "v" and x.shape[:-1] != tensors["k"].shape[:-1]:
            rows = ", ".join(map(str, tensors["k"].shape[:-1]))
            refuse(name, f"of shape ({rows}, Dv), like k", tuple(x.shape))
        if x.dtype not in (torch.float16, torch.bfloat16):
            refuse(name, "float16 or bfloat16 (8-bit inputs are for flash_ext.attention)", x.dtype)
        if x.dtype != q.dtype:
            refuse(name, f"of q's dtype {str(q.dtype).removeprefix('torch.')}", x.dtype)
    for name, value in options.items():
        if name not in _KNOWN_OPTIONS:
            raise unknown_option(name)
        if name in _NEVER_GIVEN and value is not None and value is not False:
            _refuse_option(name, _NEVER_GIVEN[name])
    for option, name in (("dropout_p", "dropout"), ("softcap", "softcap")):
        if options.get(option, 0.0) != 0:
            _refuse_option(name, "no variant that accepts 8-bit inputs has it")


def _smooths(smooth_k: bool | None, sink: Tensor | None) -> bool:
    """Whether the mean of k is subtracted. Refuse it where the result would not be the same."""
    if smooth_k and sink is not None:
        why = "a score that would not be shifted like the others"
        refuse("smooth_k", f"None or False with sink, {why}", "True")
    return sink is None if smooth_k is None else smooth_k


def _of_rows(mean: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean (B, H, D) of each row of x: (B, 1, H, D), or packed (total, H, D)."""
    if cu_seqlens is None:
        return mean[:, None]
    if mean.shape[0] == 0:
        return mean.new_zeros((x.shape[0], *mean.shape[1:]))
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    return mean[sequence.clamp(0, mean.shape[0] - 1)]


def _slope(q: Tensor, mean: Tensor, scale: float | None, cu_seqlens_q: Tensor | None) -> Tensor:
    """scale · mean, as rows of q: the gradient of `_shift`."""
    tau = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mean = mean.repeat_interleave(q.shape[-2] // mean.shape[-2], dim=-2) * tau  # (B, Hq, D)
    return _of_rows(mean, q, cu_seqlens_q)


def _shift(q: Tensor, slope: Tensor) -> Tensor:
    """scale · q·mean, by which all scores of a query are lower without the mean: as lse."""
    shift = (q * slope).sum(-1).mT  # float32: a matmul would round under autocast
    # Packed rows of no sequence have lse = -inf, whatever is added.
    return shift if q.dim() == 4 else shift.nan_to_num()


class Options(AttentionOptions, total=False):
    """The keyword arguments of `attention` and `attention_varlen`, except return_lse.

    The options of `flash_ext.attention`, of which some are refused, and of quantization.
    """

    qk_dtype: torch.dtype
    smooth_k: bool | None
    incoherent: bool
    signs: Tensor | None
    seed: int
    generator: torch.Generator | None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    max_seqlens: tuple[int | None, int | None] = (None, None),
    return_lse: bool = False,
    qk_dtype: torch.dtype = torch.int8,
    smooth_k: bool | None = None,
    incoherent: bool = True,
    signs: Tensor | None = None,
    seed: int = 0,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` and `attention_varlen`, whose options are described there."""
    require_tensors(q=q, k=k, v=v)
    for name in ("scale", "softcap", "dropout_p"):
        require_number(name, options.get(name))
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast_tensors(q.device.type, q, k, v)
    _check({"q": q, "k": k, "v": v}, cu_seqlens[0] is not None, options)
    if require_dtype("qk_dtype", qk_dtype) not in QK_8_BITS:
        refuse("qk_dtype", "int8 or float8_e4m3fn", qk_dtype)
    if not incoherent and signs is not None:
        refuse("signs", "None with incoherent=False", "a tensor")
    if incoherent and signs is None:
        dim = q.shape[-1]
        if generator is None:
            signs = _seeded_signs(dim, seed, q)
        else:
            signs = random_signs(dim, generator=generator, device=q.device)
    smooths = _smooths(smooth_k, options.get("sink"))
    quantization = _Quantization(cu_seqlens, max_seqlens, qk_dtype, signs, smooths)
    sink = options.get("sink")
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, sink)
    )
    transformed = not is_compiling() and (in_transforms() or in_dual_level())
    if needs_grad or transformed:
        function: Any = _TransformedAttend if transformed else _Attend
        out, lse = function.apply(q, k, v, sink, quantization, options)
        return (out, lse) if return_lse else out
    return _attend_without_gradient(q, k, v, quantization, return_lse, options)  # type: ignore[no-any-return]


class _Quantization(NamedTuple):
    """What quantization has to know."""

    cu_seqlens: tuple[Tensor, Tensor] | tuple[None, None]
    max_seqlens: tuple[int | None, int | None]
    qk_dtype: torch.dtype
    signs: Tensor | None
    smooths_k: bool


def _attend_without_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    quantization: _Quantization,
    return_lse: bool,
    options: dict[str, Any],
) -> Any:
    (cu_seqlens_q, cu_seqlens_k), max_seqlens, dtype, signs, smooths_k = quantization
    q_8bit, q_descale, k_8bit, k_descale, v_fp8, v_descale, mean = fp8_quantize_qkv(
        q.detach(),
        k.detach(),
        v.detach(),
        signs=signs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=options.get("seqused_k"),
        blocks_q=_blocks(q, cu_seqlens_q, max_seqlens[0]),
        blocks_k=_blocks(k, cu_seqlens_k, max_seqlens[1]),
        dtype=dtype,
        mean_rows=MEAN_ROWS if smooths_k else 0,
    )
    options = options | {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options["v_transposed"] = True
    if options.get("out_dtype") is None:
        options["out_dtype"] = q.dtype
    if cu_seqlens_q is not None:
        assert cu_seqlens_k is not None
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        attend: Any = functional.attention_varlen
    else:
        attend = functional.attention
    if not return_lse:
        return attend(q_8bit, k_8bit, v_fp8, **options)
    out, lse = attend(q_8bit, k_8bit, v_fp8, return_lse=True, **options)
    if smooths_k:
        q = q.detach()
        lse = lse + _shift(q, _slope(q, mean, options.get("scale"), cu_seqlens_q))
    return out, lse


class _Attend(torch.autograd.Function):
    """Forward in 8 bits, backward in the inputs' dtype from the inputs.

    P = exp(S - lse), with lse of the forward pass that ran, and delta from its out. Its lse differs
    from S by the errors of the 8-bit scores, so rows of P add up to 1 up to these, and rows
    of dS to what they should up to the error of out. So k is taken without its mean.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, _, quantization, options = inputs
        return _attend_without_gradient(q, k, v, quantization, True, options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, sink, quantization, options = inputs
        options = {name: x for name, x in options.items() if name not in ("out_dtype", "variant")}
        cu_seqlens_q, cu_seqlens_k = quantization.cu_seqlens
        given = attention_options(
            q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options
        )
        out, lse = output
        save(ctx, {"q": q, "k": k, "v": v, "out": out, "lse": lse}, given)
        ctx.sink_dtype = None if sink is None else sink.dtype

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        options = saved(ctx)
        q, k, v, out, lse = (options.pop(name) for name in ("q", "k", "v", "out", "lse"))
        dout, dlse = as_kernels_take(dout, dlse, out)
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        dq, dk, dv, dsink = _bwd_without_mean(dout, dlse, q, k, v, out, lse, options)
        return dq, dk, dv, dsink.to(ctx.sink_dtype) if ctx.needs_input_grad[3] else None, None, None


def _bwd_without_mean(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink by scores without the mean of k, and lse also.

    What the mean adds to dq, the sum over keys of dS times the mean, is written out: dS adds up to
    P_sink delta + (1 - P_sink) dlse, with P_sink = exp(sink - lse) or 0. Scores of a sink are not
    shifted, so its gradient is also here.
    """
    cu_seqlens_q, cu_seqlens_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    mean = token_mean(k, cu_seqlens=cu_seqlens_k, seqused=options.get("seqused_k"))
    slope = _slope(q, mean, options.get("scale"), cu_seqlens_q)
    centered = (k - _of_rows(mean, k, cu_seqlens_k)).to(k.dtype)
    options, sink = dict(options), options.get("sink")
    options.pop("sink", None)
    tensors = (dout, dlse, q, centered, v, out, (lse - _shift(q, slope)).contiguous())
    dq, dk, dv, _, dsink = bwd(*tensors, need_dbias=False, **options)
    sums = dlse
    if sink is not None:
        p_sink = torch.exp(sink[:, None] - lse).where(lse.isfinite(), 0)
        delta = (dout.float() * out).sum(-1).mT
        by_row = p_sink * (delta if dlse is None else delta - dlse)
        dsink = -by_row.sum(-1) if lse.dim() == 2 else -by_row.sum((0, 2))
        sums = by_row if dlse is None else by_row + dlse
    if sums is not None:
        sums = sums.where(lse.isfinite(), 0)
        dq = (dq + sums.mT[..., None] * slope).to(dq.dtype)
    return dq, dk, dv, dsink


class _TransformedAttend(_Attend):
    """For torch.vmap, torch.func and forward mode. It has a jvp, so not for compilers."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_tangents)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...


@with_options(Options.__annotations__, attention_options, _attend)
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_ext.attention` in 8 bits: quantizes q and k by blocks, v by channels, and attends.

    Every call quantizes k and v; where they are used more than once without gradients, call
    `quantize` yourself. Gradients are as in `flash_ext.attention` in the inputs' dtype, with out
    and lse as computed here.

    Args:
        q, k, v: as in `flash_ext.attention`, float16 or bfloat16.
        scale, causal, window, sink, seqused_k, return_lse: as in `flash_ext.attention`.
        variant: of the forward pass, as in `flash_ext.attention`.
        deterministic: of the gradients, as in `flash_ext.attention`.
        softcap, alibi_slopes, bias, dropout_p, rng_state: refused: no variant has them in 8 bits.
        q_descale, k_descale, v_descale, v_transposed: refused: `quantize` makes them.
        qk_dtype: of q and k, int8 or float8_e4m3fn. int8 is more accurate, and up to a tenth
            slower. A number that is not finite spoils what sees its block of 128 rows; in
            float8_e4m3fn only what sees its row.
        smooth_k: subtract the mean over tokens from k. None does it unless there is a sink: with
            one the result would change, and True is refused. lse has what the scores lack of it
            added again.
        incoherent: rotate q and k.
        signs: of the rotation, int8 (D), from `random_signs`. None makes them from `generator`,
            or from `seed` if there is none: the same for every call.
        seed, generator: see signs.
        out_dtype: bfloat16 or float16; None: the inputs' dtype.

    Returns:
        out, or with return_lse the pair (out, lse), as from `flash_ext.attention`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16, dtype=torch.bfloat16)
        >>> out = flash_ext.fp8.attention(q, k, v, causal=True)
        >>> out.dtype, out.shape
        (torch.bfloat16, torch.Size([2, 8, 4, 16]))
    """
    if isinstance(q, Proxy):
        return recorded(attention, q, k, v, return_lse=return_lse, **options)
    nothing = (None, None)  # given here, so not among the options
    return _attend(
        q, k, v, cu_seqlens=nothing, max_seqlens=nothing, return_lse=return_lse, **options
    )


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@with_options(Options.__annotations__, attention_options, _attend)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of packed sequences, as in `flash_ext.attention_varlen`.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k: as in `flash_ext.attention_varlen`, float16 or
            bfloat16.
        max_seqlen_q, max_seqlen_k: no less than the longest sequence. They only make the tensors of
            scales smaller; None takes the number of all rows.

    The other options are as in `attention`.

    Examples:
        >>> q, k, v = torch.randn(3, 8, 4, 16, dtype=torch.bfloat16)
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_ext.fp8.attention_varlen(q, k, v, cu_seqlens, cu_seqlens).shape
        torch.Size([8, 4, 16])
    """
    if isinstance(q, Proxy):
        packed = (k, v, cu_seqlens_q, cu_seqlens_k)
        longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        return recorded(attention_varlen, q, *packed, return_lse=return_lse, **longest, **options)
    return _attend(
        q,
        k,
        v,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        max_seqlens=(max_seqlen_q, max_seqlen_k),
        return_lse=return_lse,
        **options,
    )
