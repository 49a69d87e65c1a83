"""flash_ext under `torch.nn.functional.scaled_dot_product_attention`, forward and backward.

    from flash_ext.integrations import sdpa

    sdpa.activate()  # sdpa.restore() ends it
    with sdpa.activated():  # or for a while
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

It replaces the CUDA kernels of the aten ops that are SDPA's flash and efficient backends, and of
those below `torch.nn.attention.varlen.varlen_attn` and nested tensors, with the kernels of
`csrc/api/sdpa.cpp`: there is no Python between SDPA and flash_ext's kernels, but where the gradient
of an attn_mask is computed. What flash_ext does not run there (dropout, float32, head dims above
256, the debug mask, a paged cache, empty tensors, a GPU without the kernel) goes to torch's kernels
as before. SDPA's choice of a backend does not change: it takes the efficient one for an attn_mask.
Only cuDNN's, which comes before both on Hopper GPUs, is switched off meanwhile.

Above these ops SDPA turns a bool attn_mask into numbers, for each call again. So meanwhile
`torch.nn.functional.scaled_dot_product_attention` is a function that makes a large one a
`flash_ext.Mask`, once while the tensor lives and is not written to, and leaves all else to torch's.
Code that has imported torch's function by name, and compiled graphs, keep the slower way.

One implementation is active in the whole process, all its threads. Blocks of `activated` may be
nested and may overlap between threads: flash_ext stays active until the last of them has ended.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention as attention_backends
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.library import Library

from .. import masked, ops
from ..functional import attention_options
from ..ops import torch_private

NAME = "flash_ext"
"""The name in `torch.nn.attention.list_flash_attention_impls()`, once `activate` was called."""

_DEVICE = "CUDA"
_SCHEMAS = {
    "_scaled_dot_product_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, "
        "Tensor unused, Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
    "_scaled_dot_product_efficient_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
        "float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, "
        "Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)"
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, "
        "Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
        "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> "
        "(Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attention_forward": (
        "(Tensor query, Tensor key, Tensor value, {flash}) -> (Tensor output, "
        "Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    ),
    "_flash_attention_forward_no_dropout_inplace": (
        "(Tensor(a!) out, Tensor query, Tensor key, Tensor value, {flash}) -> "
        "Tensor softmax_logsumexp"
    ),
    "_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, "
        "SymInt? window_size_left=None, SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)"
    ),
}
"""The aten ops that are overridden, as the kernels in csrc/api/sdpa.cpp take them."""
_FLASH = (
    "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
)
_SINCE_TORCH_2_13 = ", Tensor? block_table=None, int? num_splits=None"
_OUT = "_flash_attention_forward_no_dropout_inplace"  # of varlen_attn_out, since torch 2.13

_API = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "restore_flash_attention_impl",
    "current_flash_attention_impl",
)


def _override(on: bool, with_out: bool) -> None:
    getattr(torch.ops.flash_ext, f"sdpa_override_{_DEVICE}")(on, with_out)


def _silence_override_warning() -> None:
    """Hide the dispatcher's warning, given once, that a kernel is overridden: this is intended.

    Python's filters do not apply to an override from C++, so the first override comes from Python.
    """
    library = Library("flash_ext", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"[\s\S]*Overriding a previously registered kernel"
        )
        library.impl(f"sdpa_override_{_DEVICE}", _override, "CompositeExplicitAutograd")


def _summed_dims(sizes: list[int]) -> int:
    """The dimensions, as bits, over which autograd sums the gradient of the mask that the efficient
    backward returns: the dimensions that SDPA itself has expanded to these sizes. -1 if the caller
    is not autograd's node.

    Graphs of torch.compile expect the strides that torch's kernel gives. And strides of 0 alone do
    not mean a sum: the user's leaf may have them.
    """
    node = torch_private.autograd_node()
    if node is None or node.name() != "ScaledDotProductEfficientAttentionBackward0":
        return -1
    given = torch_private.sizes_before_expand(node.next_functions[3][0], tuple(sizes))
    if given is None:
        return 0
    given = (1,) * (len(sizes) - len(given)) + given
    return sum(1 << dim for dim, size in enumerate(given) if size == 1)


_torch_sdpa = F.scaled_dot_product_attention


def _by_mask(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None, gqa: bool
) -> Tensor | None:
    """SDPA of (B, H, S, D) with a bool mask as a `flash_ext.Mask`; None if torch must run it."""
    if not type(query) is type(key) is type(value) is type(visible) is Tensor:
        return None
    if not (visible.dtype == torch.bool and query.dim() == key.dim() == value.dim() == 4):
        return None
    if query.shape[2] * key.shape[2] < masked.WORTH_A_MASK:
        return None
    if not (gqa or query.shape[1] == key.shape[1]):
        return None
    if torch_private.in_function_mode() or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return None
    device = query.device.type
    if ops.autocasts(query) and query.dtype != torch.get_autocast_dtype(device):
        return None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    given = attention_options(q, bias=visible, scale=scale)
    given = masked.with_bool_bias(q, k, v, visible, given)
    if "bias" in given:
        return None
    out: Tensor = ops.forward(q, k, v, need_lse=False, **given)[0]
    return out.transpose(1, 2)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` while flash_ext is active: torch's own,
    but for large bool masks."""
    # No Proxy of torch.fx, whose truth is unknown.
    if type(attn_mask) is Tensor and not (is_compiling() or dropout_p or is_causal):
        out = _by_mask(query, key, value, attn_mask, scale, enable_gqa)
        if out is not None:
            return out
    positional = query, key, value, attn_mask, dropout_p, is_causal
    return _torch_sdpa(*positional, scale=scale, enable_gqa=enable_gqa)


_sdpa.__name__ = _torch_sdpa.__name__  # by which torch's context_parallel replaces it
torch_private.script_as(_sdpa, "aten::scaled_dot_product_attention")


class Handle:
    """The overrides in force. `remove` ends them and gives cuDNN's backend back."""

    def __init__(self, originals: Library, with_out: bool) -> None:
        self._originals: Library | None = originals
        _override(True, with_out)
        if F.scaled_dot_product_attention is _torch_sdpa:
            F.scaled_dot_product_attention = _sdpa
        self._cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        """End the overrides; a second call does nothing."""
        if self._originals is not None:
            _override(False, False)
            if F.scaled_dot_product_attention is _sdpa:
                F.scaled_dot_product_attention = _torch_sdpa
            self._originals = None  # its ops go with the library
            if not torch.backends.cuda.cudnn_sdp_enabled():  # as it was left here
                torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


def _original(name: str) -> Any:
    return torch.library.get_kernel(f"aten::{name}", _DEVICE)


def _keep_original(library: Library, name: str, signature: str) -> None:
    """Define flash_ext::original… as torch's kernel, for what csrc/api/sdpa.cpp does not run.

    It returns only the tensors: a call of an op from C++ reads the types of the results in reverse
    order, so all must have one type.
    """
    original = _original(name)

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        results = original.call_boxed(*arguments, **keywords)
        return tuple(x for x in results if not isinstance(x, int)) if of_both_types else results

    arguments, _, returns = signature.partition(" -> ")
    of_both_types = "SymInt" in returns
    returns = returns.replace("SymInt max_q, SymInt max_k, ", "")
    library.define(f"original{name}{arguments} -> {returns}")
    library.impl(f"original{name}", kernel, _DEVICE, with_keyset=True)


def _schemas() -> dict[str, str]:
    """Of the ops that this torch has, without their names."""
    schemas = {}
    for name in _SCHEMAS:
        if hasattr(torch.ops.aten, name):
            of_torch = torch_private.schema(getattr(torch.ops.aten, name).default)
            schemas[name] = of_torch.removeprefix(f"aten::{name}")
    for flash in (_FLASH, _FLASH + _SINCE_TORCH_2_13):
        if schemas == {name: _SCHEMAS[name].format(flash=flash) for name in schemas}:
            return schemas
    raise RuntimeError(
        f"flash_ext: torch {torch.__version__} has changed the ops of SDPA's backends; "
        "flash_ext.attention does not depend on them"
    )


def _register() -> Handle:
    """Override the ops. What `torch.nn.attention` calls to activate this implementation."""
    schemas = _schemas()
    originals = Library("flash_ext", "FRAGMENT")
    originals.define("sdpa_summed_dims(int[] sizes) -> int")
    originals.impl("sdpa_summed_dims", _summed_dims, "CompositeExplicitAutograd")
    try:
        for name, signature in schemas.items():
            _keep_original(originals, name, signature)
    except RuntimeError as error:
        raise RuntimeError("flash_ext: this torch has no CUDA kernels of SDPA") from error
    _silence_override_warning()
    return Handle(originals, with_out=_OUT in schemas)


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
"""For each block of `activated` that runs: what was active before the first of them."""


def activate() -> None:
    """Run SDPA's flash and efficient backends on flash_ext, in the whole process, until `restore`.

    Call it outside of `torch.nn.attention.sdpa_kernel`, which sets torch's choice of backends back
    when it ends, cuDNN's too. It replaces another implementation, if one is active. A second call
    does nothing.

    Raises:
        RuntimeError: the CUDA kernels of flash_ext, of SDPA, or torch's interface are missing.

    Examples:
        >>> from flash_ext.integrations import sdpa
        >>> sdpa.activate()  # doctest: +SKIP
    """
    _require_api()
    if ops.cuda_missing is not None:
        raise RuntimeError(f"flash_ext: the CUDA kernels are {ops.cuda_missing}")
    with _lock:
        if attention_backends.current_flash_attention_impl() != NAME:
            attention_backends.register_flash_attention_impl(NAME, register_fn=_register)
            attention_backends.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Restore SDPA's own kernels. Does nothing where flash_ext is not active.

    Examples:
        >>> from flash_ext.integrations import sdpa
        >>> sdpa.restore()
    """
    _require_api()
    with _lock:
        if attention_backends.current_flash_attention_impl() == NAME:
            attention_backends.restore_flash_attention_impl()


@contextmanager
def activated() -> Iterator[None]:
    """`activate` for a with block; after it the implementation that was active before is again.

    Examples:
        >>> from flash_ext.integrations import sdpa
        >>> q, k, v = torch.randn(3, 2, 4, 8, 16, device="cuda")  # doctest: +SKIP
        >>> with sdpa.activated():  # doctest: +SKIP
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    """
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
