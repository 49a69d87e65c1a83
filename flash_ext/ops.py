"""The ops `torch.ops.flash_ext.fwd`, `bwd` and `check`: schemas, fake kernels, autograd, kernels.

What else PyTorch may ask of an op is in `_vmap.py`, `_flops.py` and `integrations/dtensor.py`;
`_node.py` is a second, quicker way to autograd.

    fwd(q, k, v, *, options) -> (out, lse)
    bwd(dout, dlse?, q, k, v, out, lse, *, options, need_dbias) -> (dq, dk, dv, dbias, dsink)
    check(q, k, v, *, options) -> (variant, backward, why)

check raises what fwd would, or gives the index in VARIANTS of the variant that runs, and of that
whose kernels compute its gradients. These are its own ("" for `why`), or fa2's where fa3's cannot;
-1 stands for none.

Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq);
with cu_seqlens q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv), out (total_q, Hq, Dv),
lse (Hq, total_q). lse is float32 (float64 for float64, which only the CPU kernels take) and the
natural logarithm. Gradients are contiguous and have the shape and dtype of what they belong to, or
the shape (0,): dsink without a sink, dbias without a bias, for a bool one and without need_dbias.
The options are those of `flash_ext._options.Options`.

The schemas are defined here, so fake and CPU kernels need no binary. The CUDA kernels come from
`_C.abi3.so`, if it was built.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.library import Library, register_fake

from . import _flops, _node, _vmap, tiled
from ._checks import (
    check_backward,
    check_forward,
    require_device,
    require_tensors,
    statistics_dtype,
)
from ._options import TENSOR_OPTIONS, VARIANTS, BackwardTensors, Options, schema_options
from ._torch_private import (
    any_requires_grad,
    below_autocast,
    below_autograd,
    entry,
    in_autocast,
    in_dual_level,
    in_function_mode,
    in_transforms,
    is_fake,
    recorder,
    register_autograd_kernel,
)

_BINARY = Path(__file__).with_name("_C.abi3.so")
_WHY_NOT_BUILT = Path(__file__).with_name("_C.missing.txt")
"""Written by setup.py in place of the binary."""
_HOW_TO_BUILD = (
    "Where nvcc is on PATH or in $CUDA_HOME, type this in the source folder: "
    "pip install --no-build-isolation ."
)

_library = Library("flash_ext", "DEF")


def _define(
    signature: str, returns: str, tags: tuple[torch.Tag, ...] = (), more_options: str = ""
) -> Any:
    name = signature.partition("(")[0]
    _library.define(f"{signature}, {schema_options()}{more_options}) -> {returns}", tags=tags)
    return getattr(torch.ops.flash_ext, name).default


_TRACEABLE = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

fwd = _define("fwd(Tensor q, Tensor k, Tensor v", "(Tensor out, Tensor lse)", _TRACEABLE)
bwd = _define(
    "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    _TRACEABLE,
    ", bool need_dbias=True",
)
# Asks the device what it can do, so it has no fake kernel: it is never part of a graph.
check = _define("check(Tensor q, Tensor k, Tensor v", "(int variant, int backward, str why)")


# --- Fake kernels: shapes, dtypes and strides only ---


def _require_one_device(q: Tensor, **others: Any) -> None:
    """The dispatcher brings a call here too where one tensor of many is a meta tensor."""
    for name, x in others.items():
        if isinstance(x, Tensor):
            require_device(name, x, q)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    _require_one_device(q, k=k, v=v, **options)
    *batch, rows, heads, _ = q.shape  # no batch where sequences are packed
    out = q.new_empty((*batch, rows, heads, v.shape[-1]))
    lse = q.new_empty((*batch, heads, rows), dtype=statistics_dtype(q.dtype))
    return out, lse


def _bwd_fake(*tensors: Any, need_dbias: bool = True, **options: Any) -> tuple[Tensor, ...]:
    x = BackwardTensors(*tensors)
    _require_one_device(**x._asdict(), **options)
    bias, sink = options.get("bias"), options.get("sink")
    if bias is not None and not (need_dbias and bias.is_floating_point()):
        bias = None
    gradients_of = (x.q, x.k, x.v, bias, sink)
    return tuple(x.q.new_empty(0) if y is None else y.new_empty(y.shape) for y in gradients_of)


register_fake("flash_ext::fwd", _fwd_fake, lib=_library)
register_fake("flash_ext::bwd", _bwd_fake, lib=_library)


# --- Autograd ---
# torch.library.register_autograd refuses ops with keyword-only tensors, so this registers the two
# autograd.Functions itself.


_fwd, _bwd = entry(fwd), entry(bwd)


def _refuse_tangents(ctx: Any, *tangents: Any) -> NoReturn:
    raise RuntimeError(
        "flash_ext: forward-mode derivatives (jvp, jacfwd, hessian) are not supported; "
        "flash_ext.reference.attention has them"
    )


_SAVED = (
    *("bias", "k", "q", "v", "cu_seqlens_k", "cu_seqlens_q", "lse", "out"),
    *("seqused_k", "alibi_slopes", "rng_state", "sink"),
)


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
        """bias and sink are among the options, and here for autograd to see them."""
        with below_autograd():
            out, lse = _fwd(q, k, v, **options)
        # In the order of the node of _node.py: checkpointing may recompute the one for the other.
        saved = {"k": k, "q": q, "v": v, "lse": lse, "out": out}
        if not TENSOR_OPTIONS.isdisjoint(options):
            given = {name: options.pop(name, None) for name in TENSOR_OPTIONS}
            saved = {name: x for name in _SAVED if (x := (saved | given)[name]) is not None}
        ctx.options, ctx.names = options, tuple(saved)
        ctx.save_for_backward(*saved.values())
        ctx.set_materialize_grads(False)
        return out, lse

    jvp = staticmethod(_refuse_tangents)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        k, q, v, lse, out = (saved.pop(name) for name in ("k", "q", "v", "lse", "out"))
        options = ctx.options
        need_dbias = need_dsink = False
        if saved:
            *_, need_dbias, need_dsink = ctx.needs_input_grad
            options = options | saved | {"need_dbias": need_dbias}
        if dout is None:
            dout = torch.zeros_like(out)
        elif dout.stride(-1) != 1:
            dout = dout.contiguous()
        if dlse is not None:
            dlse = dlse.contiguous()
        if torch.is_grad_enabled() or is_compiling():
            dq, dk, dv, dbias, dsink = bwd(dout, dlse, q, k, v, out, lse, **options)
        else:
            with below_autograd():
                dq, dk, dv, dbias, dsink = _bwd(dout, dlse, q, k, v, out, lse, **options)
        return None, dq, dk, dv, dbias if need_dbias else None, dsink if need_dsink else None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], options: dict[str, Any], *tensors: Any) -> Any:
        with below_autograd():
            return op(*tensors, **options)

    jvp = staticmethod(_refuse_tangents)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(
            "flash_ext: the gradient of a gradient is not supported; "
            "flash_ext.reference.attention is differentiable any number of times"
        )


_record_forward, _record_backward = recorder(_Forward), recorder(_Backward)


def meet(*tensors: Tensor) -> None:
    """Register what subclasses of Tensor need, at their first call."""
    if any(type(x).__module__.startswith("torch.distributed.tensor") for x in tensors):
        from .integrations import dtensor  # noqa: F401


def _fwd_autograd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    if type(q) is not Tensor:
        meet(q)
    bias, sink = (options.get("bias"), options.get("sink")) if options else (None, None)
    if (
        torch.is_grad_enabled() and any_requires_grad(q, k, v, bias, sink)
    ) or in_dual_level():  # tangents are refused
        return _record_forward(options, q, k, v, bias, sink)
    with below_autograd():
        return _fwd(q, k, v, **options)


def _bwd_autograd(*tensors: Any, **options: Any) -> Any:
    if (torch.is_grad_enabled() and any_requires_grad(*tensors)) or in_dual_level():
        return _record_backward(_bwd, options, *tensors)
    with below_autograd():
        return _bwd(*tensors, **options)


register_autograd_kernel(_library, fwd, _fwd_autograd)
register_autograd_kernel(_library, bwd, _bwd_autograd)
_node.define(_library, _record_backward)


# --- Autocast ---
# q, k and v alone: lse, slopes, sink and bias are float32 on purpose. The gradients need none.


def _autocast(device_type: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _fwd_autocast(device_type: str) -> Callable[..., Any]:
    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        with below_autocast(device_type):
            return fwd(*_autocast(device_type, q, k, v), **options)

    return kernel


_library.impl("fwd", _fwd_autocast("cpu"), "AutocastCPU")
_library.impl("fwd", _fwd_autocast("cuda"), "AutocastCUDA")


def is_real(x: Tensor) -> bool:
    """Whether x has elements that a kernel could read: `check` wants it."""
    return not (x.is_meta or is_fake(x))


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for x's device."""
    return in_autocast() and torch.is_autocast_enabled(x.device.type)


def forward(q: Tensor, k: Tensor, v: Tensor, *, need_lse: bool = True, **options: Any) -> Any:
    """`fwd` for callers in Python, quicker. Without need_lse, lse may have no gradient.

    Where a call would first come to its Autocast and Autograd kernels this goes there itself: the
    dispatcher's way into Python and back takes longer than a launch.
    """
    if is_compiling() or in_transforms() or in_function_mode():
        return fwd(q, k, v, **options)
    if not (type(q) is type(k) is type(v) is Tensor):
        require_tensors(q=q, k=k, v=v)
        meet(q, k, v)
        return fwd(q, k, v, **options)
    autocast = autocasts(q)
    if autocast:
        q, k, v = _autocast(q.device.type, q, k, v)
    if not need_lse and _node_forward is not None and _node.takes(q, k, v, options):
        return _node_forward(q, k, v, options)
    if not autocast:
        return _fwd_autograd(q, k, v, **options)
    with below_autocast(q.device.type):
        return _fwd_autograd(q, k, v, **options)


# --- vmap and FLOPs ---

_vmap.register(_library, fwd, bwd)
_flops.register(fwd.overloadpacket, bwd.overloadpacket)


# --- What integrations/sdpa.py switches on and off, in csrc/api/sdpa.cpp ---

_library.define("sdpa_override_CUDA(bool on, bool with_out) -> ()")

# --- CPU kernels ---


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    options = Options(**given)
    return tiled.forward(check_forward(q, k, v, options), q, k, v, options)


def _bwd_cpu(*tensors: Any, need_dbias: bool = True, **given: Any) -> tuple[Tensor, ...]:
    x, options = BackwardTensors(*tensors), Options(**given)
    gradients = tiled.backward(check_backward(x, options), x, options, need_dbias)
    return tuple(x.q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _check_cpu(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[int, int, str]:
    variant = VARIANTS.index(check_forward(q, k, v, Options(**given)))
    return variant, variant, ""


_library.impl("fwd", _fwd_cpu, "CPU")
_library.impl("bwd", _bwd_cpu, "CPU")
_library.impl("check", _check_cpu, "CPU")


# --- CUDA kernels ---


def _load_binary() -> str | None:
    """Load the CUDA kernels. Returns why they are missing, None where they are there."""
    if not _BINARY.exists():
        why = f": {_WHY_NOT_BUILT.read_text()}" if _WHY_NOT_BUILT.exists() else ""
        return f"not built{why}. {_HOW_TO_BUILD}"
    try:
        torch.ops.load_library(_BINARY)
    except OSError as error:
        return f"built, but they do not load: {error}. To rebuild them: {_HOW_TO_BUILD}"
    return None


cuda_missing = _load_binary()
"""In what state the CUDA kernels are, and what to do; None where they are loaded."""


def cuda_targets() -> str | None:
    """What the CUDA kernels were compiled for, for example "80+PTX;90a"; None without them."""
    if cuda_missing is not None:
        return None
    try:
        targets = ctypes.CDLL(str(_BINARY)).flash_ext_targets
    except AttributeError:
        return "not recorded by this build"
    targets.restype = ctypes.c_char_p
    return str(targets().decode())


def _cuda_unavailable(*tensors: Any, **options: Any) -> NoReturn:
    raise RuntimeError(f"flash_ext: the CUDA kernels are {cuda_missing}")


if cuda_missing is not None:
    for _name in ("fwd", "bwd", "check"):
        _library.impl(_name, _cuda_unavailable, "CUDA")

_node_forward = _node.find() if cuda_missing is None else None
