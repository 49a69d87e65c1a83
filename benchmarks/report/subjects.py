"""The tables of everything but speed: memory, training, options, masks, serving, many GPUs.

Each section yields the parts of one GPU, and nothing if its subject was not measured there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from cells import GRID
from common import SHAPES, Json
from options import MEASURED, MIXED, OPTIONS, PLAIN, REPEATS, SHAPED_PEERS, TABLES
from providers import LABELS

from .tables import NO, Entry, load, mask_of, pivot, provenance, select, size_name

PASSES = ("forward", "backward")
MIXED_LABELS = {"as drawn": "flash_ext", "varlen_attn": "torch's varlen_attn"}
MASK_PEERS = {"flex": "FlexAttention", "efficient": "SDPA efficient", "cudnn": "SDPA cuDNN"}
SERVING = SHAPES["serving"]
SERVING_PEERS = {"batch_invariant": "batch-invariant", "16 bits": "16 bits", "flash": "SDPA flash",
                 "varlen_attn": "torch's varlen_attn", "cudnn": "cuDNN, pages"}  # fmt: skip


def memory_table(folder: Path, *directions: str) -> str:
    """Peak extra memory in MiB over S, with standard attention's over the others'."""
    rows = load("memory", folder)
    standard = {r["direction"]: r["bytes"] for r in select(rows, provider="standard")}

    def entries() -> Iterator[Entry]:
        for direction in directions:
            words = "forward" if direction == "forward" else "forward and backward"
            base = standard.get(direction, {})
            for r in select(rows, direction=direction):
                for s, size in r["bytes"].items():
                    ratio = f" ({base[s] / size:.0f}×)" if s in base else ""
                    text = f"{size / 2**20:,.0f}" + ratio * (r["provider"] != "standard")
                    line = (f"{words}, {LABELS[r['provider']]}",)
                    yield line, f"S {size_name(int(s))}", text

    lengths = sorted({int(s) for r in rows for s in r["bytes"]})
    return pivot(["MiB (times less than standard)"], entries(),
                 (f"S {size_name(s)}" for s in lengths))  # fmt: skip


def memory_section(folder: Path) -> Iterator[str]:
    if rows := load("memory", folder):
        yield f"{provenance(rows)}."
        yield memory_table(folder, "forward", "both")


# ----------------------------------------------------------------------------------------- FP8
def fp8_errors_section(folder: Path) -> Iterator[str]:
    rows = select(load("fp8_errors", folder), experiment="outliers")
    entries = (
        ((name,), f"d {row['d']}, {row['seqlen']} keys", f"{r['rmse']:.1e} ({r['rmse_max']:.1e})")
        for row in rows for name, r in row["methods"].items()
    )  # fmt: skip
    if rows:
        yield f"Errors (`fp8_errors.py --help` defines them): {provenance(rows)}."
        yield pivot(["RMSE, mean of seeds (worst)"], entries)


# ------------------------------------------------------------------------------------ training
SIZES = {"small": "GPT-2 small", "medium": "GPT-2 medium", "bert-large": "as BERT-large",
         "llama": "4 layers as Llama 3.1 8B's"}  # fmt: skip


def size_of(cell: Json) -> str:
    """A model and its sequence length."""
    return f"{SIZES.get(cell['model'], cell['model'])}, S {cell['seqlen']}"


def training_rows(folder: Path) -> list[Json]:
    """The cells, those without a mask first, then by width and S."""
    return sorted(load("train", folder), key=lambda c: (c["causal"], c["width"], c["seqlen"]))


def training_summary(folder: Path) -> str:
    entries = (
        ((size_of(cell),), LABELS[name], f"{r['tokens_per_second']:,.0f}")
        for cell in training_rows(folder) for name, r in cell["providers"].items()
        if "tokens_per_second" in r
    )  # fmt: skip
    return pivot(["tokens/s"], entries)


def training_section(folder: Path) -> Iterator[str]:
    """Tokens per second, the ratio to SDPA, and the peak memory of each attention."""
    cells = training_rows(folder)

    def entries() -> Iterator[Entry]:
        for cell in cells:
            base = cell["providers"].get("sdpa", {}).get("tokens_per_second")
            for name, r in cell["providers"].items():
                entry = size_of(cell), LABELS[name]
                if speed := r.get("tokens_per_second"):
                    yield entry, "tokens/s", f"{speed:,.0f}"
                    yield entry, "over SDPA", f"{speed / base:.2f}" if base else NO
                    yield entry, "peak GiB", f"{r['peak_bytes'] / 2**30:.1f}"
                else:
                    why = "no memory" if "out of memory" in r["skipped"] else NO
                    yield entry, "tokens/s", "wrong" if r.get("wrong") else why

    if cells:
        left_out = "Steps that the CPU could not enqueue fast enough are left out."
        yield f"{provenance(cells, 'train')}. Median step, eager. {left_out}"
        yield pivot(["size", "attention"], entries())


def models_section(folder: Path) -> Iterator[str]:
    """A line for each of models.py's models: a step's time, and the fastest other's over ours."""
    rows = load("models", folder)

    def entries() -> Iterator[Entry]:
        for row in rows:
            for name, r in row["providers"].items():
                if "ms" in r:
                    yield (row["model"],), f"{LABELS.get(name, name)}, ms", f"{r['ms']:.2f}"
            if "ratio" in row:
                yield (row["model"],), "over flash_ext", f"{row['ratio']:.2f}"

    if rows:
        yield f"Whole models, a step in a CUDA graph: {provenance(rows, 'models')}."
        yield pivot(["model"], entries())


# ------------------------------------------------------------------------------------- options
def options_section(folder: Path) -> Iterator[str]:
    """What options and mixed lengths cost, and gradients that repeat bit by bit."""
    every = load("options", folder)
    rows = select(every, table=TABLES[:3])
    if not rows:
        return
    head_dims = sorted({c["d"] for c in select(rows, table="options")})

    def options() -> Iterator[Entry]:
        for name, (variant, direction), d in itertools.product(OPTIONS, MEASURED, head_dims):
            cells = select(rows, table="options", variant=variant, direction=direction, d=d)
            found = [c["results"].get(name, {}) for c in sorted(cells, key=lambda c: c["causal"])]
            texts = [f"{r['ratio']:.2f}" if "ratio" in r else NO for r in found]
            if name != PLAIN and set(texts) - {NO}:
                column = f"{variant} {direction}, d {d}"
                yield (f"{name}: {OPTIONS[name]}",), column, " / ".join(texts)

    def repeating() -> Iterator[Entry]:
        for c in select(rows, table="deterministic"):
            for name, r in c["results"].items():
                if name.endswith(REPEATS):
                    text = "refused" if "skipped" in r else NO
                    if "tflops" in r:
                        text = f"{r['tflops']:.0f} ({r.get('ratio', math.nan):.2f})"
                    size = f"{c['batch']} x {c['seqlen']}, {c['heads']} heads of {c['d']}"
                    yield (f"{size}, {mask_of(c)}",), name.removesuffix(REPEATS), text

    def mixed() -> Iterator[Entry]:
        for variant, direction in MIXED:
            for c in select(rows, table="mix", variant=variant, direction=direction):
                line = (f"{variant} {direction}, d {c['d']}, {mask_of(c)}",)
                for name, label in MIXED_LABELS.items():
                    if "tflops" in (r := c["results"].get(name, {})):
                        yield line, label, f"{r['tflops']:.0f}"

    columns = (f"{v} {way}, d {d}" for v, way in MEASURED for d in head_dims)
    x = rows[0]
    size = f"{x['dtype']}, B {x['batch']}, S {x['seqlen']}, {x['heads']} heads"
    yield f"{provenance(rows)}. Time over that of the plain call, full / causal: {size}."
    yield pivot(["option"], options(), columns)
    yield (
        "Backward calls that repeat bit by bit; SDPA's backends under"
        " torch.use_deterministic_algorithms."
    )
    yield pivot(["TFLOP/s (time over the usual)"], repeating())
    if mix := select(rows, table="mix"):
        m = mix[0]
        yield (
            f"Packed self-attention, {m['sequences']} sequences of {m['shortest']} to"
            f" {m['longest']} tokens, {m['tokens']} in all, {GRID['hidden']} // d heads."
        )
        yield pivot(["TFLOP/s"], mixed())
    if biases := select(every, table="bias"):
        yield (
            f"A bias (1, H, S, S), or (B, H, S, S), {biases[0]['dtype']}: {provenance(biases)}. µs;"
            " backward with the bias's gradient, but for the call without a bias. The peers are"
            " SDPA's efficient and cuDNN backends and cuEquivariance; both directions of the"
            " fastest one that has both."
        )
        yield shaped_table(biases, SHAPED_PEERS["bias"])
    if capped := select(every, table="softcap"):
        yield f"softcap: {provenance(capped)}. µs; the peers are flash-attn 3 and 4."
        yield shaped_table(capped, SHAPED_PEERS["softcap"])
    if dropped := select(every, table="dropout"):
        yield f"dropout_p 0.1: {provenance(dropped)}. µs; the peers are SDPA's flash and cuDNN."
        yield shaped_table(dropped, SHAPED_PEERS["dropout"])


def shaped_table(cells: list[Json], peers: tuple[str, ...]) -> str:
    """Both directions of each shape, and a peer's time of both over fa3's."""
    sums: dict[str, dict[str, list[float]]] = {}

    def entries() -> Iterator[Entry]:
        for c in sorted(cells, key=lambda c: c["d"]):
            ms = {name: r["ms"] for name, r in c["results"].items() if "ms" in r}
            kv = f"/{c['kv_heads']}" if c.get("kv_heads") else ""
            shape = f"{c['batch']} x {c['seqlen']}, {c['heads']}{kv} heads of {c['d']}"
            shape += ", one each" if c.get("per_batch") else ", causal" if c["causal"] else ""
            both = sums.setdefault(shape, {})
            for name, x in ms.items():
                both.setdefault(name, []).append(x)
            ms["fastest peer"] = min((ms[n] for n in peers if n in ms), default=math.nan)
            for name in (PLAIN, "fa3", "fa2", "fastest peer"):
                text = f"{ms.get(name, math.nan) * 1e3:,.0f}".replace("nan", NO)
                yield (shape,), f"{c['direction']}, {name}", text
        for shape, both in sums.items():
            times = [sum(both[n]) for n in peers if len(both.get(n, ())) == len(PASSES)]
            if times and "fa3" in both:
                yield (shape,), "both, peer over fa3", f"{min(times) / sum(both['fa3']):.2f}"

    return pivot(["shape"], entries())


# ---------------------------------------------------------------------------- masks, serving
def over(times: Json, peer: str, own: str) -> str:
    """How many times a peer's time is of a call's."""
    both = [times.get(name, {}).get("ms") for name in (peer, own)]
    return f"{both[0] / both[1]:.2f}" if all(both) else NO


def masks_section(folder: Path) -> Iterator[str]:
    """A line for each mask and direction of masks.py."""
    rows = load("masks", folder)

    def entries() -> Iterator[Entry]:
        for c in rows:
            heads = f"{c['heads']}/{c['kv_heads']} heads of {c['d']}"
            for way, words in (("forward", "forward"), ("both", "forward and backward")):
                own, times = f"flash_ext {way}", c["results"]
                line = f"{c['name']}, {c['batch']} x {c['seqlen']}, {heads}", words
                if "ms" in times.get(own, {}):
                    yield line, "blocks seen", f"{c['density']:.0%}"
                    yield line, "µs", f"{times[own]['ms'] * 1e3:,.0f}"
                    yield line, "over no mask", over(times, own, f"no mask {way}")
                    for name, label in MASK_PEERS.items():
                        yield line, label, over(times, f"{name} {way}", own)
                if way == "forward" or own in times:  # some are only made
                    yield line, "to make, µs", f"{times['make']['ms'] * 1e3:.0f}"

    if rows:
        yield (
            f"{provenance(rows)}. The mask's time over the same call's without one; and how many"
            " times as long FlexAttention and SDPA's backends with the bool mask need."
        )
        yield pivot(["mask", ""], entries())


def serving_section(folder: Path) -> Iterator[str]:
    """A line for each cell of serving.py, by table and sizes."""
    rows = load("serving", folder)

    def entries() -> Iterator[Entry]:
        for c in sorted(rows, key=lambda c: (list(SERVING["tables"]).index(c["table"]), c["d"],
                                             c["seqlen_q"], c["batch"], c["page"])):  # fmt: skip
            times = c["providers"]
            order, longest = c.get("order", "first"), c.get("longest")
            more = f", the {order} one {longest} times as long" if longest else ""
            more = ", random up to 8 times that" if order == "random" else more
            more += f", {c['cache']}" if "cache" in c else ""
            more += f", beside a chunk of {c['chunk']}" if "chunk" in c else ""
            queries = f"{c['seqlen_q']} quer{'ies' if c['seqlen_q'] > 1 else 'y'}"
            what = f"{c['table']}, d {c['d']}, {queries}, {c['batch']} x {c['seqlen']:,} keys"
            line = what + more, f"pages of {c['page']}" if c["page"] else "dense"
            if "ms" in times["flash_ext"]:
                yield line, "µs", f"{times['flash_ext']['ms'] * 1e3:,.1f}"
                yield line, "TB/s", f"{times['flash_ext']['tbps']:.2f}"
                yield line, "over dense", over(times, "flash_ext", "dense")
                for name, label in (("alone", "over no append"), ("apart", "over two calls")):
                    if (text := over(times, "flash_ext", name)) != NO:
                        yield line, label, text
                for name, label in SERVING_PEERS.items():
                    if (text := over(times, name, "flash_ext")) != NO:
                        yield line, label, text

    if rows:
        first = rows[0]
        yield (
            f"{provenance(rows)}. {first['heads']}/{first['kv_heads']} heads, bf16, each call in a"
            " CUDA graph. TB/s: of K and V. The time over that on a dense cache; and how many times"
            " as long the others need, SDPA's on a dense cache."
        )
        yield pivot(["call", "cache"], entries())


# ----------------------------------------------------------------------------------- many GPUs
def distributed_rows(folder: Path) -> list[Json]:
    """The cells that ran of methods that are measured, by length and number of GPUs."""
    left_out = ("two_level", "torch flash", " ring_flash")
    rows = [c for c in select(load("distributed", folder), kind="causal")
            if "error" not in c and not any(x in c["provider"] for x in left_out)]  # fmt: skip
    return sorted(rows, key=lambda c: (c["kind"], c["ranks"], c["rows"]))


def distributed_table(rows: list[Json], memory: bool = False) -> str:
    """A line for each provider of each cell."""

    def entries() -> Iterator[Entry]:
        for c in rows:
            over = f", over {c['over']}" if "over" in c else ""
            line = f"{c['kind']}, {c['rows']:,} tokens, {c['ranks']} GPUs", c["provider"] + over
            for way in PASSES:
                r = c.get(way, {})
                share = f" ({r['share']:.0%})" if "share" in r else ""
                text = f"{r['tflops']:.0f}{share}" if r else NO
                yield line, f"{way}, TFLOP/s a GPU" if way == "forward" else way, text
            if memory:
                yield line, "GiB a GPU", f"{c['peak_bytes'] / 2**30:.2f}"

    return pivot(["sequence", "provider"], entries())


def distributed_summary(folder: Path) -> str:
    """The methods and the best peers, on the most GPUs that were measured at 131,072 tokens."""
    rows = select(distributed_rows(folder), kind="causal", rows=131072)
    most = max((c["ranks"] for c in rows), default=0)
    return distributed_table([c for c in select(rows, ranks=most)
                              if "collectives" not in c["provider"]])  # fmt: skip


def distributed_section(folder: Path) -> Iterator[str]:
    if rows := distributed_rows(folder):
        yield (
            f"{provenance(rows, 'distributed')}. `distributed.py --help` says how this was"
            " measured. In brackets the share of one GPU's rate on the same work without"
            " communication."
        )
        yield distributed_table(rows, memory=True)
