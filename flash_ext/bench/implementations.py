"""The timed implementations: flash_ext's variants and their peers, with one signature."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import fp8
from ..explanation import explain
from ..functional import attention
from ..ops.options import FP8, VARIANTS
from .problem import Json, Shape

Bound = Callable[[], Tensor]  # an attention call with its arguments; it returns out (B, Sq, H, Dv)

WRONG, WRONG_IN_8_BITS = 0.05, 0.3  # relative errors; results beyond them are not timed


class Refused(Exception):
    """An implementation does not support the problem."""


@dataclass(frozen=True)
class Implementation:
    """One row of a table."""

    name: str
    bind: Callable[[Tensor, Tensor, Tensor], Bound]
    """From q (B, Sq, H, D), k and v to the call. Raises `Refused`."""

    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What a call needs around it."""

    ours: bool = False
    gradients: bool = True
    limit: float = WRONG


# --- flash_ext ---


def variant_rows(shape: Shape, options: Json) -> Iterator[Implementation]:
    """fa1, fa2 and fa3."""
    for name in VARIANTS:

        def bind(q: Tensor, k: Tensor, v: Tensor, name: str = name) -> Bound:
            call: Any = {"causal": shape.causal, "variant": name} | options
            found = explain(q, k, v, **call)
            if reason := found.reasons[name]:
                raise Refused(reason)
            if q.requires_grad and found.backward != name:
                instead = f"{found.backward} computes its gradients: " if found.backward else ""
                raise Refused(f"{instead}{found.why_backward or 'it has no gradients'}")
            return lambda: attention(q, k, v, **call)

        yield Implementation(f"flash_ext {name}", bind, ours=True)


def fp8_rows(shape: Shape, options: Json) -> Iterator[Implementation]:
    """fa3 on inputs of 8 bits that were quantized before, and the call that quantizes."""
    call: Any = {"causal": shape.causal} | options

    def bind(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Bound:
        signs = fp8.random_signs(q.shape[-1], device=q.device)
        q8, q_descale = fp8.quantize(q, dtype, signs=signs)
        k8, k_descale = fp8.quantize(k, dtype, signs=signs, mean=fp8.token_mean(k))
        v8, v_descale = fp8.quantize(v, scales="channel", transposed=True)
        given: Any = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        given |= call | {"v_transposed": True}
        if reason := explain(q8, k8, v8, **given).reasons["fa3"]:
            raise Refused(reason)
        return lambda: attention(q8, k8, v8, **given)

    def bind_all(q: Tensor, k: Tensor, v: Tensor) -> Bound:
        return functools.partial(cast(Any, fp8.attention), q, k, v, **call)

    row = functools.partial(Implementation, ours=True, limit=WRONG_IN_8_BITS)
    for name, dtype in ("FP8", FP8), ("int8", torch.int8):
        of_dtype = functools.partial(bind, dtype=dtype)
        yield row(f"flash_ext fa3 {name}", of_dtype, gradients=False)
    yield row("flash_ext.fp8.attention", bind_all)


# --- Peers ---


def renamed(options: Json, names: dict[str, str]) -> Json:
    """The options as a peer calls them. Raises `Refused` for one that it does not have."""
    for name in options:
        if name not in names:
            raise Refused(f"has no {name}")
    return {names[name]: value for name, value in options.items()}


def sdpa_rows(shape: Shape, options: Json) -> Iterator[Implementation]:
    """The backends of torch's scaled_dot_product_attention, except the one for other devices."""

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Bound:
        names = {"scale": "scale", "bias": "attn_mask", "dropout_p": "dropout_p"}
        call: Any = renamed(options, names)
        # A single query, which is the last, sees all keys.
        causal = shape.causal and shape.queries > 1
        if causal and shape.queries != shape.keys:
            raise Refused("is_causal aligns the first query with the first key, not the last")
        grouped = shape.heads != shape.kv_heads

        def run() -> Tensor:
            out: Tensor = scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=causal,
                enable_gqa=grouped,
                **call,
            )
            return out.transpose(1, 2)

        return run

    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    ):
        yield Implementation(f"SDPA {name}", bind, functools.partial(sdpa_kernel, [backend]))


_SHARED = {"scale": "softmax_scale", "window": "window_size", "softcap": "softcap",
           "deterministic": "deterministic"}  # fmt: skip
FLASH_ATTN = {
    "flash-attn 2": (
        "flash_attn",
        _SHARED | {"alibi_slopes": "alibi_slopes", "dropout_p": "dropout_p"},
    ),
    "flash-attn 3": ("flash_attn_interface", _SHARED),
    "flash-attn 4": ("flash_attn.cute", _SHARED | {"sink": "learnable_sink"}),
}
"""By name: the module that has flash_attn_func, and what options are called there."""


def flash_attn_rows(shape: Shape, options: Json) -> Iterator[Implementation]:
    """The releases of flash-attn that are installed."""
    for name, (module, names) in FLASH_ATTN.items():

        def bind(
            q: Tensor, k: Tensor, v: Tensor, module: str = module, names: dict[str, str] = names
        ) -> Bound:
            function = importlib.import_module(module).flash_attn_func
            call = renamed(options, names)
            if "window_size" in call and module.endswith("cute"):  # there None is unlimited
                call["window_size"] = tuple(None if x < 0 else x for x in call["window_size"])

            def run() -> Tensor:
                found = function(q, k, v, causal=shape.causal, **call)
                return cast(Tensor, found[0] if isinstance(found, tuple) else found)

            return run

        if is_installed(module):
            yield Implementation(name, bind)


def is_installed(module: str) -> bool:
    """Whether Python finds a module."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its package is missing, or is no real one
        return False


def standard_row(shape: Shape, options: Json) -> Implementation:
    """Standard attention in three passes over memory, in the inputs' dtype.

    It does less than `flash_ext.reference`, so that no ratio flatters: the scale goes into Q, and
    the mask, made before, is added in place.
    """

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Bound:
        known = ("scale", "window", "softcap", "bias", "dropout_p", "deterministic")
        call = renamed(options, dict(zip(known, known, strict=True)))
        scale = call.get("scale") or q.shape[-1] ** -0.5
        softcap, dropout_p = call.get("softcap", 0.0), call.get("dropout_p", 0.0)
        mask = additive_mask(shape, call, q)
        group = shape.heads // shape.kv_heads

        def run() -> Tensor:
            keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
            S = (q * scale).transpose(1, 2) @ keys.permute(0, 2, 3, 1)
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            if mask is not None:
                S += mask
            P = torch.dropout(S.softmax(-1), dropout_p, train=True)
            return (P @ values.transpose(1, 2)).transpose(1, 2)

        return run

    return Implementation("standard attention", bind)


def additive_mask(shape: Shape, options: Json, like: Tensor) -> Tensor | None:
    """The addend of the scores: bias, and -inf for hidden keys; (Sq, Sk) or (1, 1, Sq, Sk)."""
    left, right = shape.sides(options)
    mask: Tensor | None = options.get("bias")
    if (left, right) == (-1, -1):
        return mask
    hidden = torch.full(
        (shape.queries, shape.keys), -torch.inf, dtype=like.dtype, device=like.device
    )
    offset = shape.keys - shape.queries  # the last query is on the diagonal of the last key
    after = hidden.triu(offset + right + 1) if right >= 0 else 0
    before = hidden.tril(offset - left - 1) if left >= 0 else 0
    return after + before + (0 if mask is None else mask)  # type: ignore[return-value]


def implementations(shape: Shape, options: Json, in_8_bits: bool) -> list[Implementation]:
    """All rows, in their order."""
    return [
        *variant_rows(shape, options),
        *(fp8_rows(shape, options) if in_8_bits else ()),
        *sdpa_rows(shape, options),
        *flash_attn_rows(shape, options),
        standard_row(shape, options),
    ]
