"""From padded batches to packed sequences and back: the names of `flash_attn.bert_padding`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of input (rows, …), of two dimensions or more, at indices (n), int64: (n, …)."""
    if input.dim() < 2:
        raise ValueError(
            f"flash_ext: input must have two dimensions or more, got {tuple(input.shape)}"
        )
    return input.index_select(0, indices)


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
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            wanted = f"of shape (batch, seqlen) = {tuple(hidden_states.shape[:2])}"
            raise ValueError(f"flash_ext: {name} must be {wanted}, got {tuple(mask.shape)}")
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, int(lengths.max().item()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens (total, …) back into a batch (batch, seqlen, …), which else is 0.

    indices (total), int64, are those that `unpad_input` returns. Differentiable.
    """
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    shape = (batch, seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).view(shape)
