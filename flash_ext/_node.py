"""An autograd node in C++, for calls whose only options are causal and scale.

A node in Python (`torch.autograd.Function`) takes the host longer than a small call's kernels, and
the stable ABI has no other. ATen has an op for kernels of other packages, with a generated node;
on CUDA nobody else's are there. The node hands tensors on as they are, so these have flash_ext's
layout, and `csrc/bindings.cpp` gives the op the kernels of `fwd` and `bwd`.

Its lse is a constant to autograd, so `ops.forward` calls it for callers that want out alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._flops import node_flops
from ._torch_private import (
    any_requires_grad,
    entry,
    fake_kernels,
    in_dispatch_mode,
    in_dual_level,
    schema,
)

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
OPTIONS = {"causal": "is_causal", "scale": "scale"}
"""Those that the op has, and their names there."""


def find() -> Callable[..., Any] | None:
    """ATen's op, to be called; None where torch has it no more, or has changed it.

    None too where it cannot be given a fake kernel: torch's own says other strides of gradients.
    """
    if fake_kernels is None:
        return None
    try:
        ops = [getattr(torch.ops.aten, name).default for name in (NAME, f"{NAME}_backward")]
    except AttributeError:
        return None
    return entry(ops[0]) if [schema(op) for op in ops] == [_SCHEMA, _BACKWARD_SCHEMA] else None


def takes(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether a call of plain tensors is for the node. Modes are to see flash_ext's own ops."""
    return (
        torch.is_grad_enabled()
        and any_requires_grad(q, k, v)
        and (not options or options.keys() <= OPTIONS.keys())
        and q.is_cuda
        and not in_dispatch_mode()
        and not in_dual_level()
    )


def _backward_fake(mode: Any, op: Any, dout: Tensor, *tensors: Any, **options: Any) -> Any:
    if not dout.is_cuda:  # another package's kernels
        return NotImplemented
    with mode:
        return *(x.new_empty(x.shape) for x in tensors[:3]), None


def register() -> None:
    """What a compiler or a FLOP counter asks that comes upon a node recorded before it."""
    backward = getattr(torch.ops.aten, f"{NAME}_backward")
    if fake_kernels is not None:
        fake_kernels[backward.default] = _backward_fake
    with contextlib.suppress(RuntimeError):  # it has one, which stays
        register_flop_formula(backward, get_raw=True)(node_flops)
