"""Why the CUDA kernels do not accept the arguments of an op, in words.

In each call csrc/api tests conditions alone. If one fails it asks the op `refusal_of_…` here, which
has the op's arguments and the CPU kernels' checks: each message is written once. "" stands
for no reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.options import BackwardTensors, Options, schema_options
from ..ops.schemas import library
from .append_kv import check_append_kv
from .checks import check_arguments, check_gradients
from .into import check_into, check_plain_call
from .make_mask import (
    check_mask_from_blocks,
    check_mask_from_dense,
    check_mask_from_documents,
    check_mask_from_intervals,
    check_mask_from_kinds,
)
from .quantize import check_quantize, check_rows
from .sum_rows import check_combine_parts, check_copy_rows, check_sum_rows


def _words(check: Callable[..., object]) -> Callable[..., str]:
    def refusal(*arguments: Any, **options: Any) -> str:
        try:
            check(*arguments, **options)
        except ValueError as error:
            return str(error)
        return ""

    return refusal


def _check_fwd(q: Tensor, k: Tensor, v: Tensor, *, reads: bool = False, **given: Any) -> None:
    """reads: with FLASH_EXT_DEBUG=1, of a call that is accepted but for numbers on the device."""
    try:
        check_arguments(q, k, v, Options(**given), reads)
    except RuntimeError as error:
        if not reads:
            raise
        where = "here, for example while a CUDA graph is captured"
        raise ValueError(f"flash_ext: FLASH_EXT_DEBUG=1 cannot read lengths {where}") from error


def _check_fwd_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> None:
    check_plain_call(q, Options(**given))
    check_into("out", out, q, v)


def _check_bwd_into(dq: Tensor, dk: Tensor, dv: Tensor, *tensors: Any, **given: Any) -> None:
    x = BackwardTensors(*tensors)
    check_plain_call(x.q, Options(**given))
    for name, into, like in (("dq", dq, x.q), ("dk", dk, x.k), ("dv", dv, x.v)):
        check_into(name, into, like, like)


def _check_bwd(*tensors: Any, **given: Any) -> None:
    x, options = BackwardTensors(*tensors), Options(**given)
    check_arguments(x.q, x.k, x.v, options, reads=False)
    check_gradients(x, options)


_BACKWARD = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_OF_QUANTIZE = (
    "Tensor x, str scales, *, Tensor? signs, Tensor? mean, Tensor? cu_seqlens, Tensor? seqused,"
    " SymInt blocks, ScalarType? dtype, bool transposed"
)
OF_APPEND = (
    "Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor cache_seqlens, *, Tensor? q,"
    " Tensor? page_table, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rotary_cos,"
    " Tensor? rotary_sin, Tensor? rotary_seqlens, bool rotary_interleaved, bool q_at_one_position,"
    " Tensor? k_descale, Tensor? v_descale"
)
"""The arguments of `append_kv`."""

_OF_DOCUMENTS = (
    "Tensor first_keys, SymInt seqlen_q, SymInt seqlen_k, *, Tensor? ids, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, SymInt window_left, SymInt window_right, bool first_keys_in_window"
)

MASK_CHECKS: dict[str, Callable[..., object]] = {
    "mask_from_dense(Tensor mask": check_mask_from_dense,
    "mask_from_intervals(Tensor intervals, SymInt seqlen_k": check_mask_from_intervals,
    f"mask_from_documents({_OF_DOCUMENTS}": check_mask_from_documents,
    "mask_from_blocks(Tensor kinds, Tensor intervals": check_mask_from_blocks,
    "mask_from_kinds(Tensor kinds": check_mask_from_kinds,
}
"""Of the ops that make masks."""

_CHECKS: dict[str, Callable[..., object]] = {
    f"fwd(Tensor q, Tensor k, Tensor v, {schema_options()}, bool reads=False": _check_fwd,
    f"bwd({_BACKWARD}, {schema_options()}": _check_bwd,
    f"fwd_into(Tensor out, Tensor q, Tensor k, Tensor v, {schema_options()}": _check_fwd_into,
    f"bwd_into(Tensor dq, Tensor dk, Tensor dv, {_BACKWARD}, {schema_options()}": _check_bwd_into,
    f"fp8_quantize({_OF_QUANTIZE}": check_quantize,
    "fp8_token_mean(Tensor x, *, Tensor? cu_seqlens, Tensor? seqused": check_rows,
    "sum_rows(Tensor out, Tensor[] parts, int[] firsts, Tensor? index": check_sum_rows,
    "combine_parts(Tensor out, Tensor lse, Tensor[] parts, Tensor[] lse_parts, int[] firsts": (
        check_combine_parts
    ),
    "copy_rows(Tensor[] outs, Tensor x": check_copy_rows,
    **MASK_CHECKS,
    f"append_kv({OF_APPEND}": check_append_kv,
}
for _signature, _check in _CHECKS.items():
    library.define(f"refusal_of_{_signature}) -> str")
    _name = f"refusal_of_{_signature.partition('(')[0]}"
    library.impl(_name, _words(_check), "CompositeExplicitAutograd")
