"""Where each part is: between the markers of its name in one of ``DOCUMENTS``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from .builds import builds_section
from .compare import results_section
from .compat import compat_section
from .distributed import distributed_section
from .fp8 import fp8_section
from .front import bench_section, front_section
from .neighbors import neighbors_section
from .options import options_section
from .sections import claims_section, io_section, memory_section, numerics_section
from .support import support_section
from .train import training_section
from .walkthrough import STEPS

DOCUMENTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"speed": front_section, "bench": bench_section},
    "docs/support.md": {"support": support_section, "compat": compat_section},
    "docs/benchmarks.md": {
        "results": results_section,
        "claims": claims_section,
        "io": io_section,
        "memory": memory_section,
        "numerics": numerics_section,
        "training": training_section,
        "options": options_section,
        "fp8": fp8_section,
        "distributed": distributed_section,
        "neighbors": neighbors_section,
        "builds": builds_section,
    },
    "docs/walkthrough.md": STEPS,
}


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of ``name``."""
    begin, end = f"<!-- generated:{name} begin -->", f"<!-- generated:{name} end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"there must be the markers {begin} and {end} once, in this order")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def outdated(root: Path) -> dict[Path, str]:
    """The documents that differ from what the results give, with what they should be."""
    found = {}
    for name, sections in DOCUMENTS.items():
        before = after = (root / name).read_text()
        for section, content in sections.items():
            after = replaced(after, section, content())
        if after != before:
            found[root / name] = after
    return found
