"""The table of features, variants and devices."""

from __future__ import annotations

import common
import torch
from common import Json
from support import BOTH, features, probe

import flash_ext

from .tables import UNKNOWN, YES, gpu_folders, provenance, table


def support_section() -> str:
    """Features x variants x devices; a "no" has its reason below."""
    sources: list[tuple[str, Json | None]] = []
    for folder in gpu_folders("support"):
        result = common.read_json(folder / "support.json")
        device = next(
            (r["device"] for n in ("support", "compare", "tests")
             if (r := common.read_json(folder / f"{n}.json"))), folder.name,
        )  # fmt: skip
        sources.append((device, result["support"] if result else None))
    sources = sources or [("CUDA", None)]
    on_cpu = probe(torch.device("cpu"))
    notes: dict[str, int] = {}

    def answer(asked: Json | None, name: str, variant: str, directions: tuple[str, ...]) -> str:
        feature = features()[name]
        wanted = [d for d in directions if d in feature.directions]
        if not wanted or (asked is on_cpu and feature.cuda_only):
            return ""  # the question makes no sense
        if asked is None or variant not in asked.get(name, {}):
            return UNKNOWN
        reasons = [asked[name][variant].get(d) for d in wanted]
        reason = next((r for r in reasons if r is not None), None)
        if reason is None:
            return YES
        return f"no ({notes.setdefault(reason, len(notes) + 1)})"

    variants = flash_ext.VARIANTS
    columns = [
        *((asked, v, (direction,)) for _, asked in sources for v in variants for direction in BOTH),
        *((on_cpu, v, BOTH) for v in flash_ext.CPU_VARIANTS),
    ]
    head = [f"{v} {d}, {name}" for name, _ in sources for v in variants for d in BOTH]
    rows = [[name, *(answer(asked, name, v, d) for asked, v, d in columns)] for name in features()]
    lines = [
        f"{folder.name}: {provenance(result)}."
        for folder in gpu_folders("support")
        if (result := common.read_json(folder / "support.json"))
    ]
    lines += [table(["", *head, *(f"{v}, CPU" for v in flash_ext.CPU_VARIANTS)], rows)]
    sizes = ", ".join(str(d) if d == v else f"{d}/{v}" for d, v in flash_ext.KERNEL_DIMS)
    lines += [f"Head dims with kernels: {sizes}; others are padded inside to the next."]
    lines += [f"({number}) {reason.rstrip('.')}." for reason, number in notes.items()]
    return "\n\n".join(lines)
