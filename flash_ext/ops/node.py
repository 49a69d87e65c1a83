"""An autograd node in C++, for calls that need only out, no gradient of a sink and no dropout.

A node in Python (`torch.autograd.Function`) takes the host longer than the kernels of a small call,
and the stable ABI has no other. ATen has an op for kernels of other packages, with a generated
node; on CUDA no other package has kernels for it. The node passes tensors unchanged, so they have
flash_ext's layout, and `csrc/api/node.cpp` gives the op the kernels of `fwd` and `bwd`.

    node_options_CUDA(*, options) -> float

announces the options of the call of ATen's op that follows, which has no place for them, and names
them by a number that goes there as dropout_p.

    node_bwd(…) -> (dq, dk, dv, dbias)

has the arguments of ATen's backward op. It is what modes see of the node's backward pass, below
autograd; `node_bwd_recorded` is the same where a graph of the gradients is wanted.

The node's lse is a constant to autograd, so `ops.forward` uses it for callers that need only out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel, register_fake

from . import flops
from .autograd import record_backward
from .options import MASK_OPTIONS, TENSOR_OPTIONS, schema_options
from .schemas import library
from .torch_private import any_requires_grad, entry, in_dispatch_mode, in_dual_level, schema

NAME = "_scaled_dot_product_fused_attention_overrideable"
_SCHEMA = (
    f"aten::{NAME}(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, "
    "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
    "SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"
)
_BACKWARD_SCHEMA = (
    f"aten::{NAME}_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor attn_bias, bool[4] grad_input_mask, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
    "Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, "
    "Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias)"
)
_PLAIN = {"causal", "scale"}
"""The options that ATen's op has too."""
_PYTHON_ONLY = {
    *("sink", "dropout_p", "rng_state", "page_table"),
    *("q_descale", "k_descale", "v_descale", "v_transposed", "out_dtype"),
    *MASK_OPTIONS,
}
"""Those that only the node in Python has, or refuses."""


def takes(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether a call of plain tensors is for the node. Modes must see flash_ext's own ops."""
    if not (
        torch.is_grad_enabled()
        and q.is_cuda
        and k.is_cuda
        and v.is_cuda
        and options.keys().isdisjoint(_PYTHON_ONLY)
        and not in_dispatch_mode()
        and not in_dual_level()
    ):
        return False
    if options.keys() <= _PLAIN:
        return any_requires_grad(q, k, v)
    for name in TENSOR_OPTIONS & options.keys():
        x = options[name]
        if type(x) is not Tensor or not x.is_cuda:
            return False
    return any_requires_grad(q, k, v, options.get("bias"))


def find(device: str = "CUDA") -> Callable[..., tuple[Tensor, Tensor]] | None:
    """(q, k, v, options) -> (out, lse) for calls that `takes` is true of; out has the node.

    None if torch no longer has ATen's op, or has changed it.
    """
    try:
        ops = [getattr(torch.ops.aten, name).default for name in (NAME, f"{NAME}_backward")]
    except AttributeError:
        return None
    if [schema(op) for op in ops] != [_SCHEMA, _BACKWARD_SCHEMA]:
        return None
    aten_fwd = entry(ops[0])
    announce = entry(getattr(torch.ops.flash_ext, f"node_options_{device}").default)

    def forward(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        number = 0.0 if options.keys() <= _PLAIN else announce(**options)
        bias, causal, scale = options.get("bias"), options.get("causal"), options.get("scale")
        out, lse, *_ = aten_fwd(q, k, v, bias, number, causal or False, scale=scale)
        return out, lse

    return forward


def _bwd_fake(dout: Tensor, *tensors: Any, **options: Any) -> Any:
    *qkv, bias, (*_, need_dbias) = tensors[:5]
    return *(x.new_empty(x.shape) for x in qkv), bias.new_empty(bias.shape) if need_dbias else None


def _bwd_flops(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, **_: Any) -> int:
    *_bias_and_mask, out, lse, cu_seqlens_q, cu_seqlens_k = more[:6]
    seqused_k = more[-1]
    options = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    return flops.bwd_flops(dout, None, q, k, v, out, lse, **given)


library.define(f"node_options_CUDA({schema_options()}) -> float")
for _name in ("node_bwd", "node_bwd_recorded"):
    library.define(f"{_name}({_BACKWARD_SCHEMA.partition('(')[2]}")
_below: Any = torch.ops.flash_ext.node_bwd.default


def _bwd_recorded(*tensors: Any, **options: Any) -> Any:
    return record_backward(lambda: entry(_below)(*tensors, **options), *tensors)


library.impl("node_bwd", fallthrough_kernel, "Autograd")
library.impl("node_bwd_recorded", _bwd_recorded, "CompositeImplicitAutograd")
register_fake("flash_ext::node_bwd", _bwd_fake, lib=library)
flops.register(_below.overloadpacket, _bwd_flops)
