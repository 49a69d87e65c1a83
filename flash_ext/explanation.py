"""Which variant runs for these inputs, whose kernels compute its gradients, and why not others.

The module's name differs from the function's, so that `flash_ext.explain` is always the function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import ops
from .functional import AttentionOptions, attention_options
from .mask import Mask
from .masked import with_mask, with_packed_mask
from .ops.checks import require_number, require_tensors
from .ops.options import VARIANTS


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. `str()` of it is a readable text.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)  # (2, 8, 4, 16) each
        >>> found = flash_ext.explain(q, k, v, dropout_p=0.1)
        >>> found.variant, found.backward, found.device
        ('fa2', 'fa2', 'cpu')
    """

    variant: str | None
    """The variant that `attention` runs, or None if it raises."""

    reasons: dict[str, str | None]
    """For every variant, and an unknown one that was requested: None if it runs, or why not."""

    backward: str | None
    """The variant whose kernels compute the gradients, or None if none can."""

    why_backward: str | None
    """Why those are not the kernels of `variant`, or None if they are."""

    device: str
    """Where the inputs are, for example "cuda:0 (NVIDIA H200)"."""

    binary: str
    """Whether the CUDA kernels are loaded, and if not, what to do."""

    build: ops.Build | None = None
    """Which GPU code the CUDA kernels hold, their CUDA and source; None without them."""

    layout: str | None = None
    """Why q, k and v look as if heads and sequence were swapped, or None if they do not."""

    copied: str | None = None
    """The inputs whose rows TMA cannot address, by name: they are copied to aligned memory first.
    None if there are none. "auto" takes fa2 where a copy of many keys for few queries would cost
    more."""

    mask: str | None = None
    """How kernels get the mask: "lists of blocks", or "a bool bias" if the variant has no masks, or
    none beside these options. None without a mask."""

    def __str__(self) -> str:
        build = f" ({self.build})" if self.build else ""
        lines = [
            f"flash_ext runs: {self.variant or 'nothing, the call raises an error'}",
            f"its gradients:  {self.backward or 'none'}",
            f"device:         {self.device}",
            f"CUDA kernels:   {self.binary}{build}",
        ]
        if self.build and self.build.slow_kernels:
            slow = len(self.build.slow_kernels)
            lines += [f"slow kernels:   {slow}, which python -m flash_ext names"]
        if self.why_backward:
            lines[1] += f", because {self.why_backward}"
        if self.copied:
            lines[0] += f"; rows of {self.copied} are copied to aligned memory first"
        if self.mask:
            lines[0] += f"; the mask is {self.mask}"
        lines += [f"{name}: {reason or 'runs'}" for name, reason in self.reasons.items()]
        lines += [f"layout: {self.layout}"] if self.layout else []
        return "\n".join(lines)


def _check(
    q: Tensor, k: Tensor, v: Tensor, variant: str, options: dict[str, Any]
) -> tuple[int, int, str, str] | str:
    """What `ops.check` returns, or why this variant does not run."""
    for name, x in {"q": q, "k": k, "v": v, **options}.items():
        if isinstance(x, Tensor) and not (ops.is_real(x) and x.device.type in ("cpu", "cuda")):
            got = x.device if ops.is_real(x) else f"a {'meta' if x.is_meta else 'fake'} tensor"
            return f"{name} must be on a CPU or a CUDA device, got {got}"
    try:
        return ops.check(q, k, v, **options, variant=variant)  # type: ignore[no-any-return]
    except (ValueError, RuntimeError) as error:
        # Errors from C++ add the place in the source: before the message and on later lines.
        first_line = str(error).partition("\n")[0]
        return first_line[max(first_line.find("flash_ext:"), 0) :].removeprefix("flash_ext: ")


def _with_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, variant: str, given: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, str, dict[str, Any]]:
    """A call as the ops get it, with the variant by itself."""
    if mask is not None:
        given = given | {"variant": variant}
        if "cu_seqlens_q" in given:
            q, k, v, given = with_packed_mask(q, k, v, mask, given)
        else:
            given = with_mask(q, k, v, mask, given)
        del given["variant"]
    return q, k, v, variant, given


def _mask_of(mask: Mask | None, given: dict[str, Any]) -> str | None:
    if mask is None:
        return None
    return "lists of blocks" if "mask_words" in given else "a bool bias"


_MOST_HEADS = 128
"""No published model has more. With a smaller bound, short sequences could have more heads."""


def _swapped(q: Tensor, k: Tensor, v: Tensor, runs: bool, options: dict[str, Any]) -> str | None:
    """Why the tensors look like (B, H, S, D), which is SDPA's layout; None if they do not.

    Both layouts pass most checks. Swapped tensors have more heads than queries and keys, but so do
    some correct calls. So there must be more heads than any model has, or a call that does not run
    and would run if swapped back.
    """
    if "page_table" in options or "v_transposed" in options:
        return None
    if any(x.dim() != (3 if "cu_seqlens_q" in options else 4) for x in (q, k, v)):
        return None
    heads, (rows_q, rows_k) = max(q.shape[-2], k.shape[-2]), (q.shape[-3], k.shape[-3])
    if heads <= max(rows_q, rows_k):
        return None
    if heads <= _MOST_HEADS:
        turned_q, turned_k, turned_v = (x.transpose(-3, -2) for x in (q, k, v))
        turned = _check(turned_q, turned_k, turned_v, "auto", options)
        if runs or q.dim() == 3 or isinstance(turned, str):
            return None
    wanted = "(total, heads, head_dim)" if q.dim() == 3 else "(batch, seqlen, heads, head_dim)"
    return (
        f"{heads} heads of {rows_q} queries and {rows_k} keys look like heads and sequence swapped;"
        f" {wanted} is wanted: x.transpose({q.dim() - 3}, {q.dim() - 2})"
    )


def _device_name(device: torch.device) -> str:
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Explanation:
    """Say what `flash_ext.attention(q, k, v, **options)` would run, without running it.

    With cu_seqlens_q and cu_seqlens_k, what `flash_ext.attention_varlen` would run. Of DTensors,
    what runs on this rank's part: tensors that the call would redistribute are redistributed, so
    every rank must call it.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, options: as for those. Here floating-point tensors may
            hold anything: only their shapes, strides, dtypes and devices count. The gradient of out
            is taken to be contiguous.
        page_table: int32 (B, pages of a sequence), of the op `torch.ops.flash_ext.fwd`: k and v are
            pages, (pages, page size, Hk, D) and (…, Dv). q may then be packed by cu_seqlens_q
            alone, and seqused_k has the lengths of the keys.
        return_lse: changes nothing.

    Returns:
        An `Explanation`: print it, or read its fields.

    Raises:
        TypeError: an option that `flash_ext.attention` does not have.
        ValueError: an argument is no dense tensor, or window no pair.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)  # (2, 8, 4, 16) each
        >>> found = flash_ext.explain(q, k, v, causal=True)
        >>> found.variant
        'fa2'
        >>> print(found.reasons["fa3"])
        variant 'fa3' needs a Hopper GPU; on a CPU take 'auto' or 'fa1' or 'fa2'
    """
    require_tensors(q=q, k=k, v=v)
    ops.register_subclasses(q, k, v)
    wanted = options.pop("variant", "auto")
    require_number("dropout_p", options.get("dropout_p"))
    if options.get("dropout_p", 0.0) != 0.0 and options.get("rng_state") is None:
        # Otherwise one would be drawn, which advances the generator.
        options["rng_state"] = torch.zeros(2, dtype=torch.int64, device=q.device)
    mask = options.pop("mask", None)
    given = attention_options(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    if page_table is not None:
        require_tensors(page_table=page_table)
        given["page_table"] = page_table

    def check(name: str) -> tuple[int, int, str, str] | str:
        return _check(*_with_mask(q, k, v, mask, name, given))

    found = {name: check(name) for name in (*VARIANTS, wanted)}
    chosen = found.pop("auto") if wanted == "auto" else found[wanted]
    variant, backward, why, copied = (-1, -1, "", "") if isinstance(chosen, str) else chosen
    names = (*VARIANTS, None)  # the last of them, -1: none
    return Explanation(
        variant=names[variant],
        reasons={name: x if isinstance(x, str) else None for name, x in found.items()},
        backward=names[backward],
        why_backward=why or None,
        device=_device_name(q.device),
        binary=ops.cuda_missing or "loaded",
        build=ops.cuda_build(),
        layout=_swapped(q, k, v, any(not isinstance(x, str) for x in found.values()), given),
        copied=copied or None,
        mask=_mask_of(mask, _with_mask(q, k, v, mask, wanted, given)[-1]),
    )
