"""flash_ext under `torch.nn.functional.scaled_dot_product_attention`, forward and backward.

    from flash_ext.integrations import sdpa

    sdpa.activate()  # sdpa.restore() ends it
    with sdpa.activated():  # or for a while
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

It replaces the CUDA kernels of the aten ops that are SDPA's flash backend, and of those below
`torch.nn.attention.varlen.varlen_attn` and nested tensors. What flash_ext does not run there
(dropout, the debug mask, a paged cache, empty tensors, a GPU without the kernel) goes to torch's
kernels as before. SDPA's choice of a backend stays as it is, so an attn_mask, float32 and head dims
above 256 go to the others, but for cuDNN's, which comes before the flash backend on Hopper GPUs: it
is switched off meanwhile.

One implementation is active in the whole process, all its threads. Blocks of `activated` may be
nested and may overlap between threads: flash_ext stays active until the last of them has ended.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention as attention_backends
from torch import Tensor
from torch.library import Library

from .. import ops
from . import _varlen
from ._varlen import has_kernel, random_state, strided_like

NAME = "flash_ext"
"""The name in `torch.nn.attention.list_flash_attention_impls()`, once `activate` was called."""

_FORWARD = "_scaled_dot_product_flash_attention"
_BACKWARD = "_scaled_dot_product_flash_attention_backward"
_API = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "restore_flash_attention_impl",
    "current_flash_attention_impl",
)


def supported(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, debug: bool) -> bool:
    """Whether flash_ext runs this call of the flash backend, (B, H, S, D); else torch does."""
    tensors = (query, key, value)
    if dropout_p != 0.0 or debug or any(x.dim() != 4 or x.numel() == 0 for x in tensors):
        return False
    if any(x.stride(-1) != 1 or x.shape[-1] != query.shape[-1] for x in tensors):
        return False
    batch, heads = query.shape[:2]
    if key.shape != value.shape or key.shape[0] != batch or heads % key.shape[1] != 0:
        return False  # torch says what is wrong with these
    return has_kernel(*(x.transpose(1, 2) for x in tensors))


def forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    """What aten's forward op returns, computed by flash_ext; causal is aligned bottom-right.

    Args:
        query: (B, Hq, Sq, D), key and value (B, Hk, Sk, D), as `supported` has them.

    Returns:
        out (B, Hq, Sq, D), lse (B, Hq, Sq) in float32, None, None, Sq, Sk, and the state of the
        random generator and the debug mask, which have no content.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = ops.fwd(q, k, v, causal=is_causal, scale=scale)
    out = strided_like(out.transpose(1, 2), query)
    sizes = (query.shape[2], key.shape[2])
    return out, lse, None, None, *sizes, *random_state(query)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, with their strides, computed by flash_ext."""
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    options = {
        "causal": is_causal,
        "scale": scale,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    dq, dk, dv, _, _ = ops.bwd(dout, None, q, k, v, o, logsumexp.contiguous(), **options)
    pairs = zip((dq, dk, dv), (query, key, value), strict=True)
    return tuple(strided_like(x.transpose(1, 2), like) for x, like in pairs)


def _forward_kernel(original: Any) -> Callable[..., Any]:
    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        if supported(query, key, value, dropout_p, return_debug_mask):
            return forward(query, key, value, is_causal, scale)
        rest = (dropout_p, is_causal, return_debug_mask)
        return original.call_boxed(keys, query, key, value, *rest, scale=scale)

    return kernel


def _backward_kernel(original: Any) -> Callable[..., Any]:
    # out and lse mean the same in both kernels, so it does not matter which of them made these;
    # with dropout, whose mask does matter, both passes are torch's.
    def kernel(
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        tensors = (grad_out, query, key, value, out, logsumexp)
        if supported(query, key, value, dropout_p, False):
            return backward(*tensors, is_causal, scale)
        rest = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
        generator = (philox_seed, philox_offset)
        return original.call_boxed(keys, *tensors, *rest, *generator, scale=scale)

    return kernel


class Handle:
    """The overrides in force. `remove` ends them and gives cuDNN's backend back."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library
        self._cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        """End the overrides; a second time it does nothing."""
        if self._library is not None:
            self._library = None  # with the library go its kernels
            torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


def _original(name: str) -> Any:
    return torch.library.get_kernel(f"aten::{name}", "CUDA")


def _overrides() -> dict[str, Callable[[Any], Callable[..., Any]]]:
    """By aten op, what makes its kernel out of torch's."""
    found: dict[str, Callable[[Any], Callable[..., Any]]] = {
        _FORWARD: _forward_kernel,
        _BACKWARD: _backward_kernel,
        _varlen.FORWARD: _varlen.forward_kernel,
        _varlen.BACKWARD: _varlen.backward_kernel,
    }
    if hasattr(torch.ops.aten, _varlen.FORWARD_OUT):
        found[_varlen.FORWARD_OUT] = _varlen.forward_out_kernel
    return found


def _register() -> Handle:
    """Override the ops. What `torch.nn.attention` calls to activate this implementation."""
    overrides = _overrides()
    try:
        originals = {name: _original(name) for name in overrides}
    except RuntimeError as error:
        raise RuntimeError("flash_ext: this torch has no CUDA kernels of SDPA") from error
    library = Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():
        # That a kernel is overridden, which is the purpose, is what the dispatcher warns of.
        warnings.filterwarnings(
            "ignore", message=r"[\s\S]*Overriding a previously registered kernel"
        )
        for name, make in overrides.items():
            library.impl(name, make(originals[name]), "CUDA", with_keyset=True)
    return Handle(library)


def _require_api() -> None:
    missing = [name for name in _API if not hasattr(attention_backends, name)]
    if not hasattr(torch.library, "get_kernel"):
        missing.append("torch.library.get_kernel")
    if missing:
        raise RuntimeError(
            f"flash_ext: SDPA needs torch 2.11 or newer: torch {torch.__version__} has no "
            + ", ".join(missing)
        )


_lock = threading.RLock()
_blocks: list[str | None] = []
"""Of each block of `activated` that runs, what was active before the first of them."""


def activate() -> None:
    """Run the flash backend of SDPA on flash_ext, in the whole process, until `restore`.

    It takes the place of another implementation, if one is active. Twice is as good as once.

    Raises:
        RuntimeError: the CUDA kernels of flash_ext, of SDPA, or torch's interface are missing.
    """
    _require_api()
    if ops.cuda_missing is not None:
        raise RuntimeError(f"flash_ext: the CUDA kernels are {ops.cuda_missing}")
    with _lock:
        if attention_backends.current_flash_attention_impl() != NAME:
            attention_backends.register_flash_attention_impl(NAME, register_fn=_register)
            attention_backends.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Give SDPA its own kernels back. Nothing happens where flash_ext is not active."""
    _require_api()
    with _lock:
        if attention_backends.current_flash_attention_impl() == NAME:
            attention_backends.restore_flash_attention_impl()


@contextmanager
def activated() -> Iterator[None]:
    """`activate` for a with block; after it the implementation that was active before is again."""
    _require_api()
    with _lock:
        before = attention_backends.current_flash_attention_impl()
        activate()
        _blocks.append(_blocks[0] if _blocks else before)
    try:
        yield
    finally:
        with _lock:
            before = _blocks.pop()
            active = attention_backends.current_flash_attention_impl() == NAME
            if active and not _blocks and before != NAME:
                restore()
                if before is not None:
                    attention_backends.activate_flash_attention_impl(before)
