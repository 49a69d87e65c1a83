"""The options of the ops, described once: schemas, checks, explain and tables derive from here.

A new option is a field of `Options`, a key of `flash_ext.functional.AttentionOptions` and a
parameter of `attention_options` beside it; then comes what computes it: standard attention, the
tile loops of `flash_ext.cpu`, and csrc/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

VARIANTS = ("fa1", "fa2", "fa3")
"""Every variant, oldest first. `torch.ops.flash_ext.check` returns indices into this tuple."""

CPU_VARIANTS = ("fa1", "fa2")
"""Those with CPU kernels, oldest first; "auto" means the last. fa3 is fa2 scheduled for Hopper,
except with 8-bit inputs, which only it has, on the CPU too."""

FP8 = torch.float8_e4m3fn
"""The dtype of v where q has 8 bits."""

QK_8_BITS = (FP8, torch.int8)
"""The dtypes of 8-bit q and k; and of k and v, alike, where q has more bits."""

FP8_VARIANTS = ("fa3",)
"""The variants that take them, forward only."""

MASK_OPTIONS = ("mask_kv_tiles", "mask_q_tiles", "mask_words")
"""The tensors of a `flash_ext.Mask`, as a call has them: all or none."""

MASK_VARIANTS = ("fa2", "fa3")
"""The variants whose CUDA kernels have a mask. All CPU kernels do."""

MASK_BLOCK, MOST_MASK_BLOCKS = 128, 2**16 - 1
"""The queries, and the keys, of a block of a mask, and how many blocks one may have of each."""

DESCALE_ROWS = 128
"""The queries or keys of a block that has its own descale."""

KERNEL_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
"""Head dims, of q and of v, with CUDA kernels, as csrc/ has them (tests/test_native.py compares).
Others are padded to the first that holds them."""

# The kernels have scale · log2(e), softcap · log2(e), its inverse and scale / softcap in float32:
# within these bounds they are finite.
MAX_FACTOR = 2.0**127
_MIN_SOFTCAP = 2.0**-10  # of less, tanh cannot be told from P and lse in the backward pass


@dataclass(frozen=True)
class About:
    """The facts of an option beside its name, type and default."""

    meaning: str
    """One line, for tables and for the help of `python -m flash_ext`."""

    variants: tuple[str, ...] = VARIANTS
    """Those that take it, forward and backward, on every device that they run on."""

    dims: tuple[str, ...] = ()
    """Of a tensor: what its dimensions run over, "batch" and "heads" by these names. Leading ones
    may be missing, of a `factor` the others."""

    factor: bool = False
    """Whether it is a tensor with one number for all, or else with both batch and heads."""

    most: Mapping[str, float] = field(default_factory=dict)
    """The largest value that a variant takes, if that is less than others do."""

    wanted: str = ""
    """The values that are allowed, in words, where `allows` restricts them."""

    allows: Callable[[Any], bool] = lambda value: True


def _option(default: Any, meaning: str, **more: Any) -> Any:
    return field(default=default, metadata={"about": About(meaning, **more)})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keyword options of `torch.ops.flash_ext.fwd`, `bwd` and `check`, with their defaults.

    See `flash_ext.attention` for their meaning. There, `window` is one pair; the rest is the same.
    """

    scale: float | None = _option(None, "factor of the scores; None: 1 / sqrt(D)")
    causal: bool = _option(False, "hide the keys after each query, aligned bottom-right")
    window_left: int = _option(
        -1,
        "left side of `window`: how many keys before its own a query sees; -1: all",
        wanted="at least -1 (unlimited)",
        allows=lambda side: side >= -1,
    )
    window_right: int = _option(
        -1,
        "right side of `window`: how many keys after its own a query sees; -1: all",
        wanted="at least -1 (unlimited)",
        allows=lambda side: side >= -1,
    )
    softcap: float = _option(
        0.0,
        "c > 0 bounds the scores: c tanh(s / c); 0: no bound",
        most={"fa3": 2048},
        wanted="0 (none), or at least 2^-10 and below 2^127",
        allows=lambda c: c == 0 or _MIN_SOFTCAP <= c < MAX_FACTOR,
    )
    alibi_slopes: Tensor | None = _option(
        None, "(Hq) or (B, Hq): penalty per position of distance", dims=("batch", "heads")
    )
    bias: Tensor | None = _option(
        None,
        "added to the scores; broadcasts to (B, Hq, Sq, Sk); differentiable; bool: False hides",
        dims=("batch", "heads", "queries", "keys"),
    )
    mask_kv_tiles: Tensor | None = _option(
        None,
        "int32 (B or 1, Hq, Hk or 1, blocks of 128 queries, R): the blocks of keys that each one"
        " sees, as runs; see `flash_ext.Mask`, which makes these three",
        variants=MASK_VARIANTS,
        dims=("batch", "heads", "blocks", "runs"),
    )
    mask_q_tiles: Tensor | None = _option(
        None,
        "int32 (B or 1, Hq, Hk or 1, blocks of 128 keys, R): the blocks of queries that see each"
        " one",
        variants=MASK_VARIANTS,
        dims=("batch", "heads", "blocks", "runs"),
    )
    mask_words: Tensor | None = _option(
        None,
        "int32: of a query two intervals of keys, (B or 1, Hq, Hk or 1, rows of blocks, 4), or of a"
        " pair of blocks bits, (B or 1, Hq, Hk or 1, blocks of queries, blocks of keys, 128, 4)",
        variants=MASK_VARIANTS,
        dims=("batch", "heads", "queries", "words"),
    )
    sink: Tensor | None = _option(
        None, "(Hq): score of a first key with value 0; differentiable", dims=("heads",)
    )
    cu_seqlens_q: Tensor | None = _option(
        None, "int32 (B + 1): where packed queries start and end", dims=("offsets",)
    )
    cu_seqlens_k: Tensor | None = _option(
        None, "int32 (B + 1): where packed keys start and end", dims=("offsets",)
    )
    seqused_k: Tensor | None = _option(
        None, "int32 (B): how many of its keys a sequence uses", dims=("batch",)
    )
    page_table: Tensor | None = _option(
        None,
        "int32 (B, pages of a sequence): where the pages of its keys lie in k and v, which are then"
        " (pages, page size, Hk, D) and (…, Dv); forward only, with seqused_k",
        variants=("fa2", "fa3"),
        dims=("batch", "pages"),
    )
    dropout_p: float = _option(
        0.0,
        "probability of dropping an entry of P after the softmax; fa3: up to head dims of 128,"
        " without softcap and ALiBi",
        wanted="in [0, 1)",
        allows=lambda p: 0 <= p < 1,
    )
    rng_state: Tensor | None = _option(
        None, "int64 (2): seed and offset of the dropout mask; None: drawn", dims=("state",)
    )
    q_descale: Tensor | None = _option(
        None,
        "q = 8-bit q · this: one number, (B, Hk), or (B, Hq, ⌈Sq / 128⌉) by blocks of queries",
        variants=FP8_VARIANTS,
        dims=("batch", "heads", "blocks"),
        factor=True,
    )
    k_descale: Tensor | None = _option(
        None,
        "k = 8-bit k · this: one number, (B, Hk), or (B, Hk, ⌈Sk / 128⌉) by blocks of keys",
        variants=FP8_VARIANTS,
        dims=("batch", "heads", "blocks"),
        factor=True,
    )
    v_descale: Tensor | None = _option(
        None,
        "v = 8-bit v · this: one number, (B, Hk), or (B, Hk, Dv) by channels",
        variants=FP8_VARIANTS,
        dims=("batch", "heads", "channels"),
        factor=True,
    )
    v_transposed: bool = _option(
        False,
        "v comes as `fp8.quantize(v, transposed=True)` makes it, with the keys of a channel side by"
        " side",
        variants=FP8_VARIANTS,
    )
    out_dtype: torch.dtype | None = _option(
        None, "of out; with 8-bit inputs bfloat16 or float16, otherwise q's; None: bfloat16, or q's"
    )
    deterministic: bool = _option(False, "gradients that repeat bit by bit")
    batch_invariant: bool = _option(
        False, "a row has the same bits whatever the batch and chunks", variants=("fa2", "fa3")
    )
    variant: str = _option("auto", "'fa1', 'fa2', 'fa3', or 'auto': the fastest that runs")

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor] | None:
        """For q and for k; None if sequences are not packed."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        return self.cu_seqlens_q, self.cu_seqlens_k


FIELDS: dict[str, Field[Any]] = {x.name: x for x in fields(Options)}
"""The options by name, in the order of the schemas."""

ABOUT: dict[str, About] = {name: x.metadata["about"] for name, x in FIELDS.items()}

TENSOR_OPTIONS = frozenset(name for name, x in FIELDS.items() if "Tensor" in str(x.type))
"""The names of those that are tensors."""

CONSTANTS = frozenset(("alibi_slopes", "q_descale", "k_descale", "v_descale"))
"""Options of floating dtype that get no gradient."""


def dim_of(name: str, dims: int, what: str) -> int | None:
    """Which dimension of an option, a tensor with `dims` dimensions, is "batch" or "heads"."""
    about = ABOUT[name]
    present = about.dims[-dims:] if dims > 0 else ()
    if about.factor or name in MASK_OPTIONS:
        present = about.dims[:dims] if dims >= 2 else ()
    return present.index(what) if what in present else None


class BackwardTensors(NamedTuple):
    """The positional arguments of `torch.ops.flash_ext.bwd`."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


# The keys are the annotations above as written: `annotations` from __future__ keeps them as text.
_SCHEMA_TYPES = {
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "int": "SymInt",  # so that a new window needs no compilation
    "str": "str",
    "Tensor | None": "Tensor?",
    "torch.dtype | None": "ScalarType?",
}


def schema_options() -> str:
    """The options as the keyword-only part of an op schema: "*, float? scale=None, …"."""
    parts = (f"{_SCHEMA_TYPES[str(x.type)]} {name}={x.default!r}" for name, x in FIELDS.items())
    return "*, " + ", ".join(parts)


def table() -> str:
    """The options as a table in Markdown."""
    lines = ["| option | type | default | variants | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, x in FIELDS.items():
        about = ABOUT[name]
        variants = "all" if about.variants == VARIANTS else ", ".join(about.variants)
        variants += "".join(f"; {name} up to {most:g}" for name, most in about.most.items())
        kind = str(x.type).removesuffix(" | None")
        lines.append(f"| `{name}` | {kind} | `{x.default!r}` | {variants} | {about.meaning} |")
    return "\n".join(lines)
