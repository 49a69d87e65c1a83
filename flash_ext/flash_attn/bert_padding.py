"""From padded batches to packed sequences and back: the names of `flash_attn.bert_padding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of input (rows, …), of two dimensions or more, at indices (n), int: (n, …).

    Examples:
        >>> from flash_ext.flash_attn import index_first_axis
        >>> index_first_axis(torch.tensor([[1], [2], [3]]), torch.tensor([0, 2]))
        tensor([[1],
                [3]])
    """
    _require_rows("input", input)
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and input again, for a residual connection."""
    return index_first_axis(input, indices), input.view_as(input)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: values (n, …) at indices (n), int, of a zero (rows, …)."""
    _require_rows("values", values)
    rows = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return rows.index_copy(0, indices.long(), values)


def _require_rows(name: str, x: Tensor) -> None:
    if x.dim() < 2:
        wanted = "of two dimensions or more"
        raise ValueError(f"flash_ext: {name} must be {wanted}, got {tuple(x.shape)}")


def _as_function(function: Callable[..., Any]) -> type:
    """flash-attn's are autograd.Functions, and are called by `apply` too."""
    return type(function.__name__, (), {"apply": staticmethod(function)})


IndexFirstAxis = _as_function(index_first_axis)
IndexFirstAxisResidual = _as_function(index_first_axis_residual)
IndexPutFirstAxis = _as_function(index_put_first_axis)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max().item()) if lengths.numel() > 0 else 0


def _require_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        wanted = f"of shape (batch, seqlen) = {tuple(hidden_states.shape[:2])}"
        raise ValueError(f"flash_ext: {name} must be {wanted}, got {tuple(mask.shape)}")


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take the tokens of a padded batch that the masks name, and pack them. Waits for the device.

    Args:
        hidden_states: (B, S, …), any dtype; differentiable.
        attention_mask: (B, S), bool or int: 1 is a token, 0 is padding.
        unused_mask: like it: 1 is a place that is packed too, but is no token.

    Returns:
        the packed tokens (total, …); their indices (total), int64, into B · S; cu_seqlens (B + 1),
        int32; the longest sequence, an int; and the tokens of each sequence (B), int32, without the
        unused ones, as `flash_ext.attention_varlen` takes them for seqused_k.

    Raises:
        ValueError: a mask is not of the shape (B, S).

    Examples:
        >>> from flash_ext.flash_attn import unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> packed, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 16), mask)
        >>> packed.shape, cu_seqlens.tolist(), longest
        (torch.Size([5, 16]), [0, 2, 5], 3)
    """
    _require_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _require_mask("unused_mask", unused_mask, hidden_states)
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, _longest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` if several sequences follow one another in a row, before the padding.

    Args:
        hidden_states: (B, S, …), any dtype; differentiable.
        attention_mask_in_length: (B, S), int: a row's entries that are not 0 are the lengths of its
            sequences, in their order, wherever in the row they are.

    Returns:
        the packed tokens (total, …); their indices (total), int64, into B · S; cu_seqlens, int32,
        of all sequences; the longest of them, an int.

    Raises:
        ValueError: attention_mask_in_length is not of the shape (B, S).
    """
    _require_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    in_row = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(hidden_states.shape[1], device=in_row.device)
    indices = (places < in_row).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens (total, …) back into a batch (batch, seqlen, …), which is 0 elsewhere.

    indices (total), int, are those that `unpad_input` returns. Differentiable.

    Examples:
        >>> from flash_ext.flash_attn import pad_input, unpad_input
        >>> x, mask = torch.randn(2, 3, 16), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> packed, indices, *_ = unpad_input(x, mask)
        >>> torch.equal(pad_input(packed, indices, 2, 3), x * mask[..., None])
        True
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])
