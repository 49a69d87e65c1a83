"""One sequence split over GPUs: speed of every method and peer, and what more GPUs would give."""

from __future__ import annotations

import itertools

import common
from common import Json

from .tables import NO, NOWHERE, gpu_folders, provenance, table

PASSES = ("forward", "backward")


def _speed(result: Json, which: str) -> str:
    """TFLOP/s of a pass, and the share of the kernels alone."""
    found = result.get(which)
    if found is None:
        return NO
    share = f" ({found['share']:.0%})" if "share" in found else ""
    return f"{found['tflops']:.0f}{share}"


def _provider(result: Json) -> str:
    """Its name, and what makes it unlike the others."""
    over = f", over {result['over']}" if "over" in result else ""
    return result["provider"] + over + (", no GQA" if _is_expanded(result) else "")


def _is_expanded(result: Json) -> bool:
    """Was a peer given as many KV heads as query heads?"""
    return "torch" in result["provider"] and result["heads_k"] == result["heads_q"]


def _modelled(result: Json) -> str:
    """The cost model's time over the measured one, of both passes."""
    found = [f"{result[x]['model_ms'] / result[x]['ms']:.2f}" for x in PASSES
             if "model_ms" in result.get(x, {})]  # fmt: skip
    return ", ".join(found) or NO


def _in_turns(result: Json) -> str:
    """A peer's time over that of method="auto" in turns with it, of each pass."""
    found = [f"{result[x]['ms'] / result[x]['auto_ms']:.2f}" for x in PASSES
             if "auto_ms" in result.get(x, {})]  # fmt: skip
    return ", ".join(found) or NO


def speed_table(cells: list[Json]) -> str:
    """A line for each provider of each cell that ran."""
    rows = [
        [
            f"{c['kind']}, {c['rows']:,} tokens, {c['ranks']} GPUs",
            _provider(c),
            *(_speed(c, x) for x in PASSES),
            f"{c['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in c else NO,
            _modelled(c),
            _in_turns(c),
        ]
        for c in sorted(cells, key=lambda c: (c["kind"], c["ranks"], c["rows"]))
    ]
    head = ["sequence", "provider", "forward, TFLOP/s a GPU", "backward", "GiB a GPU",
            "model / measured", "its time / auto's, in turns"]  # fmt: skip
    return table(head, rows, words=2)


def training_table(rows: list[Json]) -> str:
    """A training step with each attention."""
    names = {"auto": "flash_ext", "torch": "SDPA under context_parallel, no GQA"}
    body = [
        [
            f"{r['layers']} layers of width {r['width']}, {r['heads']}/{r['kv_heads']} heads,"
            f" {r['rows']:,} tokens, {r['ranks']} GPUs",
            names[r["provider"]],
            f"{r['tokens_per_second']:,.0f}",
            f"{r['losses'][0]:.3f} to {r['losses'][-1]:.3f}",
            f"{r['peak_bytes'] / 2**30:.1f}",
        ]
        for r in rows
    ]
    head = ["examples/train_long.py", "attention", "tokens/s", "loss", "GiB a GPU"]
    return table(head, body, words=2)


def left_out(cells: list[Json]) -> list[str]:
    """Who did not run, a line for each reason."""
    reasons = dict.fromkeys((c["provider"], c["error"]) for c in cells if "error" in c)
    return [f"- {provider}: {error.rstrip('.')}." for provider, error in reasons]


def projection_table(rows: list[Json]) -> str:
    """The model's share of the kernels' rate with more GPUs, by method."""
    methods = list(rows[0]["methods"])
    body = [
        [f"{length:,} tokens, {r['ranks']} GPUs",
         *(f"{r['methods'][m]['share']:.0%}" for m in methods)]
        for length, group in itertools.groupby(rows, lambda r: r["rows"])
        for r in group
    ]  # fmt: skip
    return table(["forward and backward, model", *methods], body)


def distributed_section() -> str:
    """Everything of distributed.json, for each device."""
    parts: list[str] = []
    for folder in gpu_folders():
        result = common.read_json(folder / "distributed.json")
        if result is None:
            continue
        missing = left_out(result["cells"])
        cells = [c for c in result["cells"] if "error" not in c]
        steps = [c for c in cells if c["kind"] == "training"]
        parts += [
            f"{result['device']}: {provenance(result)}. {result['method']}",
            speed_table([c for c in cells if c not in steps]),
            *(
                [f"Training, the median of {len(steps[0]['losses'])} steps:", training_table(steps)]
                if steps
                else []
            ),
            *(["Not measured:\n\n" + "\n".join(missing)] if missing else []),
        ]
        if result["projection"]:
            parts += [
                "What the cost model says of more GPUs (up to 8 in one host, then one network card"
                " of 400 Gbit/s each), from the kernels' measured speeds; not measured:",
                projection_table(result["projection"]),
            ]
    return "\n\n".join(parts) or NOWHERE
