"""flash_ext as an attention implementation of Hugging Face transformers 5.

    from flash_ext.integrations import transformers as fa_ext

    fa_ext.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=fa_ext.NAME)

Every model that takes its attention from `transformers.AttentionInterface` can run on it. As with
SDPA there, only the mask says which keys a query sees. What it says is followed or refused, never
ignored:

    causal, sliding window, bidirectional: options of the kernels, which take no memory.
    packed sequences (position_ids, cu_seq_lens_q and _k), and padding of causal layers:
        the stretches of tokens become sequences of `attention_varlen`, without a copy of q, k and v
        but where a cache has them. Padded queries give 0 and get gradient 0.
    padding at the end for layers that are not causal: seqused_k. Padded queries see the keys that
        the others see. A position bias, T5's, is not copied per sequence then.
    other padding (at the start while decoding, in the midst of tokens), or whose values cannot be
        looked at, under torch.compile: a bool bias (B, 1, 1, Sk).
    a static cache's places for later tokens: seqused_k, if there are no padding and no window.
    anything else (image tokens, chunks, other static caches, a 4-D mask of the user's):
        transformers' mask (B, 1, Sq, Sk), as a bias.

In fa3 a large bool bias is a `flash_ext.Mask`, made once for all layers that share it. Attention
probabilities are never returned.

A model that computes attention by itself, as bloom and longformer do, gets the mask of eager
attention where it reads a mask's numbers: its results are right but no faster, and a warning says
so. What a model tells its eager attention, and keys that it adds after its mask was made, are
followed or refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from ..flash_attn.shared import rows_contiguous
from ..functional import attention, attention_varlen
from ..ops.checks import statistics_dtype
from . import _transformers_paged
from ._transformers_mask import Mask

NAME = "fa_ext"
"""What to give as attn_implementation. transformers takes every name with "flash" in it for one
of its flash-attn backends and looks for that package, so it is not "flash_ext"."""

PAGED_NAME = "flash_ext_3"
"""What to give for `generate_batch`, continuous batching: transformers' own wrappers of flash-attn
call flash_ext, and keys are read from pages. transformers looks for "flash" with a 2 or 3 after."""

_UNSUPPORTED = ("output_attentions", "head_mask", "indices", "block_indices", "cache")
"""Keywords of models that need something that this does not compute: sparse and paged attention.
`_refused` finds others."""


# --- the mask function ---


def _variables(function: Any, code: Any) -> dict[str, Any]:
    """The closure of function, by name, if it was compiled from this code."""
    if getattr(function, "__code__", None) is not code:
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.empty(0, device="cpu")).__code__


def _packed_ids(mask_function: Callable[..., Any]) -> Tensor | None:
    """The sequence of each token, (B, S), where transformers found packed position_ids.

    Only the mask's function tells that, an `and_masks` of two. Where a release writes this
    differently the result is None, and the mask becomes a dense one.
    """
    parts = _variables(mask_function, _AND).get("mask_functions", ())
    found = [_variables(part, _PACKED).get("packed_sequence_mask") for part in parts]
    ids = [x for x in found if x is not None]
    return ids[0] if len(parts) == 2 and len(ids) == 1 else None


def _values_unknown(device: torch.device | str) -> bool:
    """Whether the host cannot read tensors: under torch.compile, in a CUDA graph's capture."""
    if torch.compiler.is_compiling():
        return True
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _inspect_padding(visible: Tensor) -> tuple[bool, bool, bool]:
    """Of bool (B, S): is all visible, is each row one stretch at most, does it start its row."""
    starts = (visible[:, 1:] & ~visible[:, :-1]).sum(-1)
    found = visible.all(), (starts + visible[:, 0] <= 1).all(), (starts == 0).all()
    whole, stretch, at_start = torch.stack(found).tolist()
    return whole, stretch, at_start


def _sequences(ids: Tensor) -> tuple[Tensor, Tensor]:
    """cu_seqlens, int32 (n + 1), of the stretches of equal ids in (B, S), and the first of each."""
    starts = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).flatten()
    first = starts.nonzero().flatten()
    return F.pad(first, (0, 1), value=starts.numel()).int(), first


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **kwargs: Any,
) -> Mask:
    """The mask function: `transformers.masking_utils.sdpa_mask` has its arguments.

    allow_is_causal_skip and allow_is_bidirectional_skip say that there is no more to the mask than
    being causal or bidirectional, local_size and padding; local_size is a sliding window or the
    size of chunks.

    Returns:
        What `attention_forward` takes. Never None: to layers that are not causal, and to models
        that add the mask to their own scores, that would be no mask at all.

    Raises:
        ValueError: attention_mask is not of shape (B, Sk).
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        wanted = "of shape (batch, seqlen_k) or of four dimensions"
        raise ValueError(
            f"flash_ext: attention_mask must be {wanted}, got {tuple(attention_mask.shape)}"
        )

    causal = not allow_is_bidirectional_skip
    described = partial(Mask, (batch_size, 1, q_length, kv_length), device=device, dtype=dtype)

    def dense() -> Mask:
        visible: Tensor | None = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **kwargs,
        )
        if visible is not None:
            return described(False, dense=visible)
        # An empty cache has room for later keys.
        return described(causal, seqlen_k=q_length if causal and q_length > 1 else None)

    # The last query is the last key, except with static caches, which have room for later tokens.
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    plain = mask_function is masking_utils.causal_mask_function and not use_vmap
    if causal and plain and attention_mask is None and local_size is None and not aligned:
        zeros = torch.zeros(batch_size, dtype=torch.int32, device=device)
        return described(True, seqused_k=(zeros + (q_offset + q_length - kv_offset)).int())
    same_tokens = aligned and q_length == kv_length > 1
    unknown = _values_unknown(device)
    ids, maybe_packed = None, False
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        if use_vmap or not same_tokens:
            return dense()
        if unknown:
            # A function's closure cannot be read then. But without vmap there is no more to those
            # that are an `and_masks`.
            maybe_packed = getattr(mask_function, "__code__", None) is _AND
        else:
            ids = _packed_ids(mask_function)
        if ids is None and not maybe_packed:
            return dense()

    window = (-1, -1)
    if local_size is not None:
        is_window = getattr(config, "sliding_window", None) == local_size
        is_chunk = getattr(config, "attention_chunk_size", None) == local_size
        if is_window == is_chunk or (is_chunk and kv_offset + kv_length > local_size):
            return dense()
        if is_window and not causal:
            window = (local_size, local_size)
        elif is_window and kv_length > local_size:
            window = (local_size - 1, 0)
    if (causal or window != (-1, -1)) and not aligned:
        return dense()
    if maybe_packed:
        return replace(dense(), causal=causal, window=window)
    if ids is not None:
        return described(causal, window, cu_seqlens=_sequences(ids)[0])

    visible = None
    stretch = at_start = False
    if attention_mask is not None:
        end = kv_offset + kv_length
        visible = F.pad(attention_mask.bool(), (0, max(end - attention_mask.shape[1], 0)))
        visible = visible[:, kv_offset:end]
        if not unknown:
            whole, stretch, at_start = _inspect_padding(visible)
            if whole:
                visible = None
    if visible is None:
        return described(causal, window)
    if causal and same_tokens and stretch:
        cu_seqlens, first = _sequences(visible)
        seqused_k = cu_seqlens.diff() * visible.flatten()[first]
        return described(
            causal, window, padding=visible, cu_seqlens=cu_seqlens, seqused_k=seqused_k
        )
    if not causal and window == (-1, -1) and at_start:
        # Queries stay whole: in cross attention they are other tokens, even if as many.
        seqused_k = visible.sum(-1, dtype=torch.int32)
        return described(causal, window, padding=visible, seqused_k=seqused_k)
    return described(causal, window, padding=visible)


# --- the attention function ---


_refused_in: dict[str, frozenset[str]] = {}
"""What `_refused` found, by module."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refused(source: str) -> frozenset[str]:
    """Keywords that mean something to attention in the module of this name, and nothing here.

    Models pass on keywords of all kinds, and attention needs few of them: those that their own
    eager attention names.
    """
    if source not in _refused_in:
        found = set(_UNSUPPORTED)
        for name, function in vars(sys.modules.get(source, object)).items():
            if name.endswith("eager_attention_forward"):
                found |= inspect.signature(function).parameters.keys()
        ours = inspect.signature(attention_forward).parameters.keys()
        _refused_in[source] = frozenset(found - ours)
    return _refused_in[source]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _only_eager(source: str) -> bool:
    """Whether the models in the module of this name know only eager attention.

    For them no mask means that nothing is hidden, and their layers' is_causal was never read.
    """
    models = [
        x
        for x in vars(sys.modules.get(source, object)).values()
        if isinstance(x, type) and issubclass(x, transformers.PreTrainedModel)
    ]
    own = [x for x in models if x.__module__ == source]
    return bool(own) and not any(getattr(x, "_supports_sdpa", True) for x in own)


def _bias(visible: Tensor | None, position_bias: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask, bool or added to the scores, and a bias of the scores as one bias."""
    if visible is None or position_bias is None:
        bias = visible if position_bias is None else position_bias
    elif visible.dtype == torch.bool:
        bias = position_bias.masked_fill(~visible, -torch.inf)
    else:
        bias = position_bias + visible
    if bias is not None and bias.dtype not in (torch.bool, q.dtype):
        bias = bias.to(statistics_dtype(q.dtype))
    return bias


def _without_mask(
    module: nn.Module,
    shape: tuple[int, int, int, int],
    is_causal: bool | None,
    sliding_window: int | None,
) -> Mask:
    """No mask is a causal one, where the layer is causal and there is more than one query."""
    rows, keys = shape[2:]
    causal = is_causal
    if causal is None:
        causal = getattr(module, "is_causal", True) and not _only_eager(type(module).__module__)
    causal = bool(causal and rows > 1)
    if causal and rows > keys:
        raise ValueError(
            "flash_ext: attention_mask must be given where a causal layer has more queries than "
            f"keys, got None with {rows} and {keys}"
        )
    window = (-1, -1)
    if sliding_window is not None:
        window = (sliding_window - 1, 0 if causal or rows == 1 else sliding_window - 1)
    return Mask(shape, causal, window, seqlen_k=rows if causal else None)


def _require_shape(mask: Mask, shape: tuple[int, int, int, int]) -> None:
    """The scores, (B, 1, Sq, Sk), are those that the mask was made for, if it matters."""
    fits = True
    if mask.cu_seqlens is not None:
        fits = mask.shape == shape
    elif mask.causal or mask.window != (-1, -1):
        fits = mask.shape[2:] == shape[2:]
    elif mask.padding is not None or mask.dense is not None:
        fits = mask.shape[3] == shape[3]
    if not fits:
        raise ValueError(
            "flash_ext: attention_mask is one for (batch, 1, seqlen_q, seqlen_k) = "
            f"{mask.shape}, got scores for {shape}: this model changes its queries or keys after "
            "the mask was made; use another attn_implementation"
        )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function, differentiable in query, key, value, s_aux and position_bias.

    Args:
        module: the layer; its `is_causal` stands for is_causal if that is None.
        query: (B, Hq, Sq, D); key (B, Hk, Sk, D) and value (B, Hk, Sk, Dv), of dtypes and sizes as
            `flash_ext.attention` takes them.
        attention_mask: what `mask` makes, or (B or 1, Hq or 1, Sq or 1, Sk or 1), bool (True is
            visible) or floating (added to the scores). None is causal where the layer is, in models
            that support SDPA. Without a cache all keys are then visible to the last query; with
            more keys than queries the later ones are an empty cache's, which no query sees.
        dropout, scaling, softcap, s_aux: dropout_p, scale, softcap and sink of `attention`.
        sliding_window: this many keys are visible, the query's own included. Only with no mask:
            otherwise the mask has it already.
        position_bias: added to the scores, as bias of `attention`.
        cu_seq_lens_q, cu_seq_lens_k: (n + 1): the packed sequences, as `attention_varlen` has them.
            B · Sq rows of queries are one after the other.

    Returns:
        (B, Sq, Hq, Dv), and None for the probabilities.

    Raises:
        ValueError, RuntimeError: a mask or keyword that is not supported, or cannot be kept to
            beside another; what `flash_ext.attention` raises.
    """
    for name in _refused(type(module).__module__):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"flash_ext: {name} is not supported: use another attn_implementation")
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("flash_ext: cu_seq_lens_q and cu_seq_lens_k must be given together")
    batch, _, rows, _ = query.shape
    shape = batch, 1, rows, key.shape[2]
    if attention_mask is None:
        rule = _without_mask(module, shape, is_causal, sliding_window)
    elif isinstance(attention_mask, Mask):
        device = query.device
        rule = attention_mask if attention_mask.device == device else attention_mask.to(device)
        _require_shape(rule, shape)
    elif isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        rule = Mask(shape, False)
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                f"flash_ext: attention_mask must be bool or floating, got {attention_mask.dtype}"
            )
    else:
        got = getattr(attention_mask, "shape", None) or type(attention_mask).__name__
        raise ValueError(f"flash_ext: attention_mask must be of four dimensions, got {got}")

    if rule.seqlen_k is not None and cu_seq_lens_k is None:
        key, value = key[:, :, : rule.seqlen_k], value[:, :, : rule.seqlen_k]
        if position_bias is not None:
            position_bias = position_bias[..., : rule.seqlen_k]
    q, k, v = (rows_contiguous(x.transpose(1, 2)) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "causal": rule.causal and rows > 1,
        "window": rule.window,
        "softcap": softcap or 0.0,
        "sink": s_aux,
        "dropout_p": dropout,
    }
    visible = attention_mask if isinstance(attention_mask, Tensor) else None
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    seqused_k, biased = rule.seqused_k, position_bias is not None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        # A dense mask of packed sequences is causal as well, and the offsets say the rest.
        other = visible is not None or (rule.dense is not None and not rule.causal)
        if other or rule.padding is not None:
            raise ValueError("flash_ext: cu_seq_lens_q goes with no padding and no 4-D mask")
        cu_seqlens = cu_seq_lens_q, cu_seq_lens_k
    elif rule.dense is not None:
        visible = rule.dense
    elif rule.padding is not None and (
        seqused_k is None or (biased and rule.cu_seqlens is not None)
    ):
        visible, seqused_k = rule.padding[:, None, None], None
    elif rule.cu_seqlens is not None:
        cu_seqlens = rule.cu_seqlens, rule.cu_seqlens

    if cu_seqlens is None:
        bias = _bias(visible, position_bias, q)
        return attention(q, k, v, bias=bias, seqused_k=seqused_k, **options), None
    if position_bias is not None:
        raise ValueError("flash_ext: position_bias goes with no packed sequences")
    tokens = (x.flatten(0, 1) for x in (q, k, v))
    offsets = (x.int() for x in cu_seqlens)
    out = attention_varlen(*tokens, *offsets, seqused_k=seqused_k, **options)
    return out.unflatten(0, q.shape[:2]), None


# --- registration ---


def register() -> None:
    """Make `NAME` and `PAGED_NAME` attention implementations of transformers, used if named.

    Raises:
        RuntimeError: a transformers whose mask functions are called otherwise.

    Examples:
        >>> from flash_ext.integrations import transformers as fa_ext
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> fa_ext.register()
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1)
        >>> config._attn_implementation = fa_ext.NAME
        >>> LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
    """
    wanted = inspect.signature(masking_utils.sdpa_mask).parameters
    missing = {"q_length", "q_offset", "local_size", "allow_is_bidirectional_skip"} - set(wanted)
    if missing:
        raise RuntimeError(
            "flash_ext: transformers 5.5 or newer is needed: the masks of transformers "
            f"{transformers.__version__} know no {', '.join(sorted(missing))}"
        )
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, mask)
    _transformers_paged.register(PAGED_NAME)
