"""The table of features, variants and devices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import Json
from support import BOTH, FEATURES, probe

import flash_ext

from .tables import UNKNOWN, Entry, device_of, gpu_folders, load, pivot, provenance


def support_section() -> str:
    """Features x variants x devices; a "no" has its reason below."""
    gpus = gpu_folders("support")[:1]  # others answer alike
    asked = {device_of(p): {r["feature"]: r["answers"] for r in load("support", p)} for p in gpus}
    sources: dict[str, Json] = (asked or {"CUDA": {}}) | {"CPU": probe(torch.device("cpu"))}
    notes: dict[str, int] = {}

    def answer(answers: Json, directions: list[str]) -> str:
        reason = next((r for d in directions if (r := answers.get(d)) is not None), None)
        return "yes" if reason is None else f"no ({notes.setdefault(reason, len(notes) + 1)})"

    def entries() -> Iterator[Entry]:
        for name, feature in FEATURES.items():
            for device, found in sources.items():
                cpu = device == "CPU"
                for variant in flash_ext.CPU_VARIANTS if cpu else flash_ext.VARIANTS:
                    for ways in (list(feature.directions),) if cpu else ([d] for d in BOTH):
                        column = f"{variant}, CPU" if cpu else f"{variant} {ways[0]}, {device}"
                        answers = found.get(name, {}).get(variant)
                        text = UNKNOWN if answers is None else answer(answers, ways)
                        asked = set(ways) <= set(feature.directions)
                        yield (name,), column, text if asked else ""

    lines = [pivot([""], entries())]
    sizes = ", ".join(str(d) if d == v else f"{d}/{v}" for d, v in flash_ext.KERNEL_DIMS)
    lines += [f"Head dims with kernels: {sizes}; others are padded inside to the next."]
    lines += [f"({number}) {reason.rstrip('.')}." for reason, number in notes.items()]
    lines += [f"{device_of(p)}: {provenance(load('support', p), 'support')}." for p in gpus]
    return "\n\n".join(lines)
