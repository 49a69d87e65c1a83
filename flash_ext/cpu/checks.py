"""The argument checks of attention, in words.

The CPU kernels run them in each call. The CUDA kernels have the same conditions in
csrc/api/accept.h, and come here only for the words of a refusal (`refusals`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.checks import dtype_name, head_dim_v, refuse, require_device, statistics_dtype
from ..ops.options import (
    ABOUT,
    CPU_VARIANTS,
    DESCALE_ROWS,
    FP8,
    FP8_VARIANTS,
    MASK_BLOCK,
    MASK_OPTIONS,
    MAX_FACTOR,
    MOST_MASK_BLOCKS,
    QK_8_BITS,
    TENSOR_OPTIONS,
    VARIANTS,
    BackwardTensors,
    Options,
)
from ..ops.quantize import transposed_shape

_CUDA_DTYPES = (torch.float16, torch.bfloat16, *QK_8_BITS)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *QK_8_BITS)
_MAX_HEAD_DIM = 256
_MAX_LENGTH = 2**29  # on CUDA, where positions and indices of tiles of 16 rows have 32 bits
_MAX_TILES = 2**31


def _require_shape(argument: str, tensor: Tensor, shape: tuple[int, ...], layout: str) -> None:
    if tuple(tensor.shape) != shape:
        refuse(argument, f"of shape {layout} = {shape}", tuple(tensor.shape))


def _require_contiguous_rows(argument: str, tensor: Tensor) -> None:
    if tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(argument, "contiguous in its last dimension", f"strides {tensor.stride()}")


def _require_like(
    argument: str, tensor: Tensor, q: Tensor, dtype: torch.dtype | None = None
) -> None:
    if tensor.dtype != (dtype or q.dtype):
        refuse(argument, f"of q's dtype {dtype_name(q.dtype)}", tensor.dtype)
    require_device(argument, tensor, q)
    _require_contiguous_rows(argument, tensor)


def require_plain(
    argument: str,
    tensor: Tensor | None,
    q: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: str,
) -> None:
    """A contiguous tensor on q's device, or None."""
    if tensor is None:
        return
    if tensor.dtype != dtype:
        refuse(argument, dtype_name(dtype), tensor.dtype)
    _require_shape(argument, tensor, shape, layout)
    require_device(argument, tensor, q)
    if not tensor.is_contiguous():
        refuse(argument, "contiguous", f"strides {tensor.stride()}")


def _check_variant(options: Options) -> None:
    if options.variant not in ("auto", *VARIANTS):
        refuse("variant", " or ".join(map(repr, ("auto", *VARIANTS))), repr(options.variant))


def _choose_8_bit_variant(q: Tensor, options: Options) -> str:
    """With the reasons of csrc/plan/fa1.cpp, fa2.cpp and fa3.cpp."""
    variant = FP8_VARIANTS[-1] if options.variant == "auto" else options.variant
    if variant not in FP8_VARIANTS:
        raise ValueError(f"flash_ext: variant {variant!r} has no 8-bit inputs")
    of_q = q.dtype in QK_8_BITS
    for name, given in (
        ("softcap", of_q and options.softcap != 0),
        ("ALiBi", of_q and options.alibi_slopes is not None),
        ("page table", of_q and options.page_table is not None),
        ("mask", options.mask_kv_tiles is not None),
    ):
        if given:
            raise ValueError(f"flash_ext: variant {variant!r} has no {name} with 8-bit inputs")
    return variant


def _choose_variant(q: Tensor, k: Tensor, options: Options) -> str:
    if k.dtype in QK_8_BITS:
        return _choose_8_bit_variant(q, options)
    if options.variant == "auto":
        return CPU_VARIANTS[-1]
    if options.variant not in CPU_VARIANTS:
        others = " or ".join(map(repr, ("auto", *CPU_VARIANTS)))
        name = options.variant
        raise ValueError(f"flash_ext: variant {name!r} needs a Hopper GPU; on a CPU take {others}")
    if options.page_table is not None and options.variant not in ABOUT["page_table"].variants:
        raise ValueError(f"flash_ext: variant {options.variant!r} has no page table")
    if options.batch_invariant and options.variant not in ABOUT["batch_invariant"].variants:
        raise ValueError(f"flash_ext: variant {options.variant!r} is not batch-invariant")
    return options.variant


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    packed, pages = options.cu_seqlens_q is not None, options.page_table is not None
    if packed:
        rows_q, rows_k, hint = "total_q", "total_k", "with cu_seqlens_q and cu_seqlens_k"
    else:
        rows_q, rows_k = "batch, seqlen_q", "batch, seqlen_k"
        hint = "(packed sequences come with cu_seqlens_q, to attention_varlen)"
    if pages:
        rows_k, hint = "pages, page_size", "with page_table"
    layouts = (
        ("q", q, f"({rows_q}, heads_q, head_dim)"),
        ("k", k, f"({rows_k}, heads_k, head_dim)"),
        ("v", v, f"({rows_k}, heads_k, head_dim_v)"),
    )
    if options.v_transposed:
        if pages or q.dtype not in QK_8_BITS:
            refuse("v_transposed", "False with page_table, and unless q has 8 bits", True)
        layouts = (*layouts[:2], ("v", v, f"({'batch, ' * (not packed)}heads_k, head_dim_v, keys)"))
    for name, tensor, layout in layouts:
        if tensor.dim() != layout.count(",") + 1:
            refuse(name, f"of shape {layout} {hint}", tuple(tensor.shape))
    dtypes = _CUDA_DTYPES if q.device.type == "cuda" else _DTYPES
    if q.dtype not in dtypes:
        *first, last = map(dtype_name, dtypes)
        refuse("q", f"{', '.join(first)} or {last}", q.dtype)
    _require_like("q", q, q)
    if k.dtype in QK_8_BITS and q.dtype not in QK_8_BITS:
        _require_like("k", k, q, k.dtype)
        if v.dtype != k.dtype:
            refuse("v", f"of k's dtype {dtype_name(k.dtype)}", v.dtype)
    else:
        _require_like("k", k, q)
    if q.dtype == torch.int8 and v.dtype != FP8:
        refuse("v", "float8_e4m3fn with q and k in int8", v.dtype)
    _require_like("v", v, q, FP8 if q.dtype == torch.int8 else k.dtype)

    heads_q, head_dim = q.shape[-2:]
    heads_k, dim_v = k.shape[-2], head_dim_v(v, vars(options))
    for name, size in (("q", head_dim), ("v", dim_v)):
        if not 1 <= size <= _MAX_HEAD_DIM:
            refuse(f"{name}'s head dimension", f"1 to {_MAX_HEAD_DIM}", size)
    given = k.shape[:-2]
    shape_k = tuple(given) if pages or packed else (q.shape[0], given[1])
    _require_shape("k", k, (*shape_k, heads_k, head_dim), layouts[1][2])
    if heads_k == 0:
        refuse("k's number of heads", "at least 1", heads_k)
    if heads_q % heads_k != 0:
        refuse("q's number of heads", f"a multiple of k's, {heads_k}", heads_q)
    shape_v: tuple[int, ...] = (*shape_k, heads_k, dim_v)
    if options.v_transposed:
        offsets = options.cu_seqlens_q
        batch = q.shape[0] if offsets is None else max(offsets.numel() - 1, 0)
        shape_v = transposed_shape(shape_k[-1], heads_k, dim_v, batch, packed)
    _require_shape("v", v, shape_v, layouts[2][2])


def check_offsets(argument: str, cu_seqlens: Tensor, total: int) -> None:
    """Check that sequences follow one another within the rows of the tensor."""
    previous = 0
    for index, offset in enumerate(cu_seqlens.tolist()):
        if index == 0 and offset != 0:
            refuse(f"{argument}[0]", "0", offset)
        if not previous <= offset <= total:
            wanted = f"from {previous} (the entry before) to {total} (all rows)"
            refuse(f"{argument}[{index}]", wanted, offset)
        previous = offset


def _check_lengths(q: Tensor, k: Tensor, options: Options, reads: bool) -> int:
    """Check the arguments that give the lengths of the sequences. Returns their number, B."""
    batch = q.shape[0]
    if options.cu_seqlens_q is not None:
        batch = max(options.cu_seqlens_q.numel() - 1, 0)
    for name, x in (("cu_seqlens_q", q), ("cu_seqlens_k", k)):
        if (cu_seqlens := getattr(options, name)) is not None:
            require_plain(name, cu_seqlens, q, torch.int32, (batch + 1,), "(batch + 1)")
            if reads:
                check_offsets(name, cu_seqlens, x.shape[0])
    if options.page_table is not None:
        _check_page_table(q, k, options, batch)
    if options.seqused_k is not None:
        require_plain("seqused_k", options.seqused_k, q, torch.int32, (batch,), "(batch)")
        if not reads:
            return batch
        packed = options.cu_seqlens_k
        lengths = [key_rows(k, options)] * batch if packed is None else packed.diff().tolist()
        for b, (used, length) in enumerate(zip(options.seqused_k.tolist(), lengths, strict=True)):
            if not 0 <= used <= length:
                refuse(f"seqused_k[{b}]", f"from 0 to the sequence's {length} keys", used)
        if options.page_table is not None:
            _check_pages(options.page_table, options.seqused_k, *k.shape[:2])
    return batch


def key_rows(k: Tensor, options: Options) -> int:
    """How many keys a sequence may have, or all of packed ones together."""
    if options.page_table is None:
        return k.shape[-3]
    return options.page_table.shape[1] * k.shape[1]


def _check_page_table(q: Tensor, k: Tensor, options: Options, batch: int) -> None:
    table = options.page_table
    assert table is not None
    if table.dtype != torch.int32:
        refuse("page_table", "int32", table.dtype)
    shape = (batch, table.shape[-1] if table.dim() > 0 else 0)
    _require_shape("page_table", table, shape, "(batch, pages of a sequence)")
    require_device("page_table", table, q)
    _require_contiguous_rows("page_table", table)
    if options.seqused_k is None:
        refuse("seqused_k", "given with page_table: how many keys each sequence has", None)
    if k.shape[1] == 0 or (k.shape[0] == 0 and shape[1] > 0):
        refuse("k", "of at least one page with at least one row", tuple(k.shape))
    without = "None with page_table (no variant has both)"
    if options.bias is not None:
        refuse("bias", without, tuple(options.bias.shape))
    if options.dropout_p != 0:
        refuse("dropout_p", "0 with page_table (no variant has both)", options.dropout_p)


def _check_pages(table: Tensor, seqused_k: Tensor, pages: int, size: int) -> None:
    """Check that the pages of used keys exist. Other entries may hold anything."""
    for b, (row, used) in enumerate(zip(table.tolist(), seqused_k.tolist(), strict=True)):
        for i, page in enumerate(row[: -(-used // size)]):
            if not 0 <= page < pages:
                refuse(f"page_table[{b}, {i}]", f"one of k's pages, 0 to {pages - 1}", page)


def _check_sizes(q: Tensor, k: Tensor, batch: int, options: Options) -> None:
    """The limits of the CUDA kernels; elements are addressed in 64 bits."""
    packed = q.dim() == 3
    for name, heads, length in (
        ("q", q.shape[-2], q.shape[-3]),
        ("k", k.shape[-2], key_rows(k, options)),
    ):
        if length >= _MAX_LENGTH:
            refuse(f"{name}'s sequence length", "below 2^29", length)
        matrices = heads * (1 if packed else batch)
        tiles = matrices * (length // 16 + 1 + (batch + 1 if packed else 0))
        if max(matrices, tiles) >= _MAX_TILES:
            got = f"{matrices} (batch, head) pairs of {length} rows"
            refuse(name, "of fewer than 2^31 tiles of 16 rows", got)


def _check_bias(q: Tensor, k: Tensor, options: Options, batch: int, reads: bool) -> None:
    bias = options.bias
    assert bias is not None
    floating = dict.fromkeys((q.dtype, statistics_dtype(q.dtype)))  # which may be one
    if bias.dtype not in (*floating, torch.bool):
        refuse("bias", f"{', '.join(map(dtype_name, floating))} or bool", bias.dtype)
    require_device("bias", bias, q)
    shape = tuple(bias.shape)
    if bias.dim() != 4:
        refuse("bias", "of shape (batch, heads_q, seqlen_q, seqlen_k), any of them 1", shape)
    wanted = {"batch": batch, "heads_q": q.shape[-2]}
    if q.dim() == 4:  # packed sequences have any length, and a bias may be longer
        wanted |= {"seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}
    for dim, (name, size) in enumerate(wanted.items()):
        if shape[dim] not in (1, size):
            refuse("bias", f"1 or {name} = {size} in dimension {dim}", shape)
    if q.device.type != "cuda":
        return
    if max(shape) >= _MAX_LENGTH:
        refuse("bias", "below 2^29 in every dimension", shape)
    if reads and options.cu_seqlens is not None:  # positions past its end would be hidden
        for dim, cu_seqlens in enumerate(options.cu_seqlens, 2):
            longest = _most_rows(q.shape[0], cu_seqlens)
            if 1 != shape[dim] < longest:
                as_long = f"as long as the longest sequence in dimension {dim}, at least {longest}"
                refuse("bias", as_long, shape[dim])


def _check_mask(q: Tensor, k: Tensor, options: Options, batch: int) -> None:
    given = {name: getattr(options, name) for name in MASK_OPTIONS}
    if all(x is None for x in given.values()):
        return
    for name, x in given.items():
        if x is None:
            refuse(name, f"given, as are the others of {', '.join(MASK_OPTIONS)}", None)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"):
        if getattr(options, name) is not None:
            refuse(name, "None with a mask, which says where sequences end", "a tensor")
    for name, without in (("causal", False), ("window_left", -1), ("window_right", -1)):
        if (got := getattr(options, name)) != without:
            refuse(name, f"{without} with a mask, which has the window", got)
    kv_tiles, q_tiles, words = given.values()
    blocks_q, blocks_k = (-(-x.shape[1] // MASK_BLOCK) for x in (q, k))
    if max(blocks_q, blocks_k) > MOST_MASK_BLOCKS:
        most = f"for at most {MOST_MASK_BLOCKS} blocks of {MASK_BLOCK} queries, and of keys"
        refuse("mask_kv_tiles", most, f"{blocks_q} and {blocks_k}")
    heads, heads_k = q.shape[2], k.shape[2]
    matrices = tuple(kv_tiles.shape[:2])
    for name, x, blocks in (
        ("mask_kv_tiles", kv_tiles, blocks_q),
        ("mask_q_tiles", q_tiles, blocks_k),
    ):
        shape = tuple(x.shape)
        runs = shape[-1] if shape else 0
        broadcasts = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads, heads_k)
        if not broadcasts or shape[2] != blocks or not 8 <= runs < 2**31 or runs % 4 != 0:
            heads_of = f"1, heads_q = {heads} or heads_k = {heads_k}"
            sizes = f"(1 or batch = {batch}, {heads_of}, {blocks} blocks, runs)"
            refuse(name, f"of shape {sizes}, runs at least 8 and a multiple of 4", shape)
    _require_shape("mask_q_tiles", q_tiles, (*matrices, *q_tiles.shape[2:]), "mask_kv_tiles' sizes")
    intervals = (*matrices, blocks_q * MASK_BLOCK, 4)
    bits = (*matrices, blocks_q, blocks_k, MASK_BLOCK, 4)
    if tuple(words.shape) not in (intervals, bits):
        refuse(
            "mask_words", f"of shape {intervals} (intervals) or {bits} (bits)", tuple(words.shape)
        )
    for name, x in given.items():
        require_plain(name, x, q, torch.int32, tuple(x.shape), "")
        if x.numel() > 0 and x.data_ptr() % 16 != 0:
            refuse(name, "aligned to 16 bytes", f"one that starts {x.data_ptr() % 16} bytes later")


def _most_rows(rows: int, cu_seqlens: Tensor | None) -> int:
    """Of any sequence."""
    if cu_seqlens is None:
        return rows
    return max(cu_seqlens.diff().tolist(), default=0)


def check_descale(
    argument: str,
    descale: Tensor,
    q: Tensor,
    shape: tuple[int, int],
    large: str,
    last: int | None,
    more: bool = False,
) -> None:
    """One number, (batch, heads_k) = `shape`, or the large shape with `last` numbers a head.

    None: only the device knows how many. more: of packed sequences, of which some are shorter.
    """
    if descale.dtype != torch.float32:
        refuse(argument, "float32", descale.dtype)
    require_device(argument, descale, q)
    batch, heads_k = shape
    heads = q.shape[-2] if argument == "q_descale" else heads_k
    given = tuple(descale.shape)
    whole = given[:2] == (batch, heads) and len(given) == 3
    fits = whole and (last is None or given[2] == last or (more and given[2] > last))
    if given in ((), (1,), shape) or fits:
        return
    numbers = "blocks" if last is None else f"at least {last}" if more else last
    wanted = f"one number, of shape (batch, heads_k) = {shape}, or {large} ="
    refuse(argument, f"{wanted} ({batch}, {heads}, {numbers})", given)


def _check_8_bit_options(
    q: Tensor, k: Tensor, v: Tensor, options: Options, batch: int, reads: bool
) -> None:
    """What only 8-bit inputs have, and what they cannot have."""
    for name, x in (("q_descale", q), ("k_descale", k), ("v_descale", v)):
        if x.dtype not in QK_8_BITS and getattr(options, name) is not None:
            got = f"one for {dtype_name(x.dtype)}"
            refuse(name, f"None unless {name[0]} has 8 bits", got)
    if q.dtype not in QK_8_BITS and options.out_dtype not in (None, q.dtype):
        refuse("out_dtype", f"None or q's dtype {dtype_name(q.dtype)}", options.out_dtype)
    if k.dtype not in QK_8_BITS:
        return
    if q.dtype in QK_8_BITS and options.out_dtype not in (None, torch.bfloat16, torch.float16):
        refuse("out_dtype", "bfloat16 or float16 with 8-bit inputs", options.out_dtype)
    without = "with 8-bit inputs (no variant has both)"
    if options.bias is not None:
        refuse("bias", f"None {without}", tuple(options.bias.shape))
    if options.dropout_p != 0:
        refuse("dropout_p", f"0 {without}", options.dropout_p)
    if options.batch_invariant:
        refuse("batch_invariant", f"False {without}", True)
    shape = (batch, k.shape[-2])
    blocks_q, blocks_k = (
        -(-_most_rows(rows, cu_seqlens) // DESCALE_ROWS) if reads or cu_seqlens is None else None
        for rows, cu_seqlens in (
            (q.shape[-3], options.cu_seqlens_q),
            (key_rows(k, options), options.cu_seqlens_k),
        )
    )
    queries, keys = (
        "(batch, heads_q, blocks of 128 queries)",
        "(batch, heads_k, blocks of 128 keys)",
    )
    channels = "(batch, heads_k, head_dim_v)"
    for name, large, last, more in (
        ("q_descale", queries, blocks_q, options.cu_seqlens_q is not None),
        ("k_descale", keys, blocks_k, options.cu_seqlens_k is not None),
        ("v_descale", channels, head_dim_v(v, vars(options)), False),
    ):
        if (descale := getattr(options, name)) is not None:
            check_descale(name, descale, q, shape, large, last, more)


def _check_options(q: Tensor, k: Tensor, options: Options, batch: int, reads: bool) -> None:
    heads, dtype = q.shape[-2], statistics_dtype(q.dtype)
    for name, about in ABOUT.items():
        if name not in TENSOR_OPTIONS and not about.allows(getattr(options, name)):
            refuse(name, about.wanted, getattr(options, name))
    softcap, scale = options.softcap, options.scale
    max_scale = MAX_FACTOR * (min(softcap, 1.0) if softcap > 0 else 1.0)
    if scale is not None and not abs(scale) < max_scale:
        wanted = "below 2^127 in magnitude, and below 2^127 softcap if that is given"
        refuse("scale", wanted, scale)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes
        if slopes.dtype != dtype:
            refuse("alibi_slopes", dtype_name(dtype), slopes.dtype)
        shape = (heads,) if slopes.dim() == 1 else (batch, heads)
        _require_shape("alibi_slopes", slopes, shape, "(heads_q) or (batch, heads_q)")
        require_device("alibi_slopes", slopes, q)
        _require_contiguous_rows("alibi_slopes", slopes)
    if options.bias is not None:
        _check_bias(q, k, options, batch, reads)
    _check_mask(q, k, options, batch)
    require_plain("sink", options.sink, q, dtype, (heads,), "(heads_q)")
    if options.dropout_p > 0:
        if options.rng_state is None:
            refuse("rng_state", "given when dropout_p > 0", None)
        layout = "(seed and offset)"
        require_plain("rng_state", options.rng_state, q, torch.int64, (2,), layout)


def check_arguments(q: Tensor, k: Tensor, v: Tensor, options: Options, reads: bool = True) -> None:
    """Check the arguments of the forward pass.

    Args:
        reads: Also the contents of tensors, for which a GPU is waited for.

    Raises:
        ValueError: an argument is wrong; the message names it, what was expected and what was
        given.
    """
    _check_variant(options)
    pages = options.page_table is not None
    if pages and options.cu_seqlens_k is not None:
        wanted = "None with page_table, where seqused_k has the lengths of the keys"
        refuse("cu_seqlens_k", wanted, "a tensor")
    if not pages and (options.cu_seqlens_q is None) != (options.cu_seqlens_k is None):
        given = "cu_seqlens_q" if options.cu_seqlens_k is None else "cu_seqlens_k"
        refuse("cu_seqlens_q and cu_seqlens_k", "given together", f"{given} alone")
    _check_inputs(q, k, v, options)
    batch = _check_lengths(q, k, options, reads)
    if q.device.type == "cuda":
        _check_sizes(q, k, batch, options)
    _check_8_bit_options(q, k, v, options, batch, reads)
    _check_options(q, k, options, batch, reads)


def check_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str:
    """Check the arguments of the forward pass, as `check_arguments`; returns the CPU's variant."""
    check_arguments(q, k, v, options)
    return _choose_variant(q, k, options)


def check_gradients(tensors: BackwardTensors, options: Options) -> None:
    """Check the arguments of the backward pass that the forward pass has not."""
    q, v = tensors.q, tensors.v
    if options.page_table is not None:
        refuse("page_table", "None in a backward pass, which no variant has with pages", "a tensor")
    for name, x in (("q", q), ("k", tensors.k)):
        if x.dtype in QK_8_BITS:
            why = "no variant has a backward for 8-bit inputs"
            on_cuda = q.device.type == "cuda"
            wanted = "float16 or bfloat16" if on_cuda else "float16, bfloat16, float32 or float64"
            refuse(name, f"{wanted} ({why})", x.dtype)
    *rows, heads, _ = q.shape
    if options.cu_seqlens is None:
        out_layout = "(batch, seqlen_q, heads_q, head_dim_v)"
        lse_layout = "(batch, heads_q, seqlen_q)"
    else:
        out_layout, lse_layout = "(total_q, heads_q, head_dim_v)", "(heads_q, total_q)"
    for name in ("dout", "out"):
        _require_shape(name, getattr(tensors, name), (*rows, heads, v.shape[-1]), out_layout)
        _require_like(name, getattr(tensors, name), q)
    for name in ("lse", "dlse"):
        x, dtype, shape = (
            getattr(tensors, name),
            statistics_dtype(q.dtype),
            (*rows[:-1], heads, rows[-1]),
        )
        require_plain(name, x, q, dtype, shape, lse_layout)


def check_backward(tensors: BackwardTensors, options: Options) -> str:
    """Check the arguments of the backward pass; returns the CPU's variant."""
    variant = check_forward(tensors.q, tensors.k, tensors.v, options)
    check_gradients(tensors, options)
    return variant
