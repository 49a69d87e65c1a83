"""Autograd and autocast of the ops.

torch.library.register_autograd refuses ops with keyword-only tensors, so this registers the two
autograd.Functions itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .checks import refuse_gradients
from .options import CONSTANTS, QK_8_BITS, TENSOR_OPTIONS
from .schemas import bwd, fwd, library
from .torch_private import (
    any_requires_grad,
    below_autocast,
    below_autograd,
    entry,
    in_dual_level,
    is_zero_tensor,
    recorder,
    register_autograd_kernel,
)

_fwd, _bwd = entry(fwd), entry(bwd)


def refuse_tangents(ctx: Any, *tangents: Any) -> NoReturn:
    """The jvp of an autograd.Function that has none."""
    raise RuntimeError(
        "flash_ext: forward-mode derivatives (jvp, jacfwd, hessian) are not supported; "
        "flash_ext.reference.attention has them"
    )


def _is_zero(x: Tensor) -> bool:
    return not is_compiling() and is_zero_tensor(x)


def as_kernels_take(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of out and lse that autograd passes, with memory and contiguous rows."""
    if dout is None or _is_zero(dout):
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    return dout, None if dlse is None or _is_zero(dlse) else dlse.contiguous()


# In the order of the node of node.py: checkpointing may recompute one in place of the other.
_SAVED = (
    *("bias", "k", "q", "v", "cu_seqlens_k", "cu_seqlens_q", "lse", "out"),
    *("seqused_k", "alibi_slopes"),
)


def save(ctx: Any, tensors: dict[Any, Tensor], options: dict[str, Any]) -> None:
    """Save named tensors and the options of an op, some of which are tensors, for `saved`."""
    if not TENSOR_OPTIONS.isdisjoint(options):
        given = {name: x for name, x in options.items() if isinstance(x, Tensor)}
        options = {name: x for name, x in options.items() if name not in given}
        given |= tensors
        tensors = {name: given.pop(name) for name in _SAVED if name in given} | given
    ctx.options, ctx.names = options, tuple(tensors)
    ctx.save_for_backward(*tensors.values())
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> dict[Any, Any]:
    """The tensors and the options by name. Call it once: activation checkpointing recomputes."""
    return ctx.options | dict(zip(ctx.names, ctx.saved_tensors, strict=True))  # type: ignore[no-any-return]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: dict[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """bias and sink are among the options too; as arguments autograd sees them."""
        with below_autograd():
            out, lse = _fwd(q, k, v, **options)
        save(ctx, {"k": k, "q": q, "v": v, "lse": lse, "out": out}, options)
        return out, lse

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        options = saved(ctx)
        k, q, v, lse, out = (options.pop(name) for name in ("k", "q", "v", "lse", "out"))
        need_dbias = need_dsink = False
        if "bias" in options or "sink" in options:
            *_, need_dbias, need_dsink = ctx.needs_input_grad
            options["need_dbias"] = need_dbias
        dout, dlse = as_kernels_take(dout, dlse, out)
        if torch.is_grad_enabled() or is_compiling():
            dq, dk, dv, dbias, dsink = bwd(dout, dlse, q, k, v, out, lse, **options)
        else:
            with below_autograd():
                dq, dk, dv, dbias, dsink = _bwd(dout, dlse, q, k, v, out, lse, **options)
        return None, dq, dk, dv, dbias if need_dbias else None, dsink if need_dsink else None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], Any], *tensors: Any) -> Any:
        """tensors: what the call of an op reads, for autograd to see."""
        with below_autograd():
            return call()

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(
            "flash_ext: the gradient of a gradient is not supported; "
            "flash_ext.reference.attention is differentiable any number of times"
        )


_record_forward, record_backward = recorder(_Forward), recorder(_Backward)
"""Apply the Functions above."""


SUBCLASS_MODULES: dict[str, str] = {}
"""From the package of a subclass of Tensor to the module that registers the ops on it."""


def register_subclasses(*tensors: Tensor) -> None:
    """Register the ops on the subclasses of Tensor among these, at their first call."""
    for package, module in SUBCLASS_MODULES.items():
        if any(type(x).__module__.startswith(package) for x in tensors):
            import_module(module)


def fwd_autograd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The Autograd kernel of fwd."""
    if type(q) is not Tensor:
        register_subclasses(q)
    bias = sink = None
    if options:
        bias, sink = options.get("bias"), options.get("sink")
        if not CONSTANTS.isdisjoint(options):
            refuse_gradients(**{name: options.get(name) for name in CONSTANTS})
    needs_grad = torch.is_grad_enabled() and any_requires_grad(q, k, v, bias, sink)
    if needs_grad or in_dual_level():  # tangents are refused
        if needs_grad and k.dtype in QK_8_BITS:
            raise RuntimeError("flash_ext: no variant has a backward for 8-bit inputs")
        if needs_grad and options.get("page_table") is not None:
            raise RuntimeError("flash_ext: no variant has a backward with a page table")
        return _record_forward(options, q, k, v, bias, sink)
    with below_autograd():
        return _fwd(q, k, v, **options)


def _bwd_autograd(*tensors: Any, **options: Any) -> Any:
    every = (*tensors, *(x for x in options.values() if isinstance(x, Tensor)))
    if (torch.is_grad_enabled() and any_requires_grad(*every)) or in_dual_level():
        return record_backward(lambda: _bwd(*tensors, **options), *every)
    with below_autograd():
        return _bwd(*tensors, **options)


register_autograd_kernel(library, fwd, fwd_autograd)
register_autograd_kernel(library, bwd, _bwd_autograd)


# --- Autocast ---
# Only of q, k and v: lse, slopes, sink and bias are meant to be float32. Gradients need no cast.

_CAST = (torch.float16, torch.bfloat16, torch.float32)


def autocast_tensors(device_type: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of 16 and 32 bits in autocast's type, as torch's ops; refused dtypes stay refused."""
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype in _CAST else x for x in tensors)


def _fwd_autocast(device_type: str) -> Callable[..., Any]:
    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        with below_autocast(device_type):
            return fwd(*autocast_tensors(device_type, q, k, v), **options)

    return kernel


library.impl("fwd", _fwd_autocast("cpu"), "AutocastCPU")
library.impl("fwd", _fwd_autocast("cuda"), "AutocastCUDA")
