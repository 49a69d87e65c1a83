"""The measured parts of docs/walkthrough.md."""

from __future__ import annotations

from collections.abc import Callable

from . import claims, figures
from .figures import LABELS
from .sections import picture
from .tables import NOWHERE, main_gpu, table

WALKTHROUGH = "docs/walkthrough.md"


def walkthrough(*names: str, gains: Callable[[claims.Results], list[list[str]]]) -> str:
    """A step's figures and gains, on the GPU of which most is measured."""
    folder = main_gpu()
    if folder is None:
        return NOWHERE
    parts = picture(folder, *names, document=WALKTHROUGH)
    results = figures.load(folder)
    if rows := gains(results):
        device = next((r["device"] for r in results.values() if "device" in r), folder.name)
        parts.append(table([f"measured, {device}", "", "conditions"], rows, words=3))
    return "\n\n".join(parts) or NOWHERE


def found(*texts: str) -> Callable[[claims.Results], list[list[str]]]:
    """Figures of some of the claims, by their first words."""

    def gains(results: claims.Results) -> list[list[str]]:
        rows = []
        for text in texts:
            (claim,) = [c for c in claims.CLAIMS if c.text.startswith(text)]
            finding = claim.measure(results)
            if finding:
                rows.append([claim.text, finding.figure, finding.conditions])
        return rows

    return gains


def softmax_step(results: claims.Results) -> list[list[str]]:
    """What the safe form is for."""
    rows = results.get("numerics", {}).get("softmax", [])
    broken = [r for r in rows if "finite" in r["forms"]["naive"]]
    if not broken:
        return []
    shares = ", ".join(f"{1 - r['forms']['naive']['finite']:.1%}" for r in broken)
    sizes = ", ".join(f"{r['largest']:g}" for r in broken)
    return [["entries that the naive form turns into NaN", shares, f"largest logits {sizes}"],
            ["the same, safe and online", "0", "the same logits"]]  # fmt: skip


def one_step(after: str, before: str) -> Callable[[claims.Results], list[list[str]]]:
    """One generation over the one before, in both directions, at the size of the figure."""

    def gains(results: claims.Results) -> list[list[str]]:
        rows = []
        for direction, speeds in figures.generations_data(results) or ():
            if after in speeds and before in speeds:
                rows.append([
                    f"{LABELS[after]} over {LABELS[before]}, {direction}",
                    f"{speeds[after]:.0f} over {speeds[before]:.0f} TFLOP/s,"
                    f" {speeds[after] / speeds[before]:.2f}×",
                    "d 128, S 2048, full",
                ])  # fmt: skip
        return rows

    return gains


def both(*parts: Callable[[claims.Results], list[list[str]]]
         ) -> Callable[[claims.Results], list[list[str]]]:  # fmt: skip
    """The rows of several."""
    return lambda results: [row for part in parts for row in part(results)]


STEPS: dict[str, Callable[[], str]] = {
    "three-passes": lambda: walkthrough(
        gains=both(softmax_step, found("standard attention moves", "standard attention is bound"))
    ),
    "online-softmax": lambda: walkthrough(
        "numerics", gains=found("online softmax is", "exact: no")
    ),
    "tiling": lambda: walkthrough(
        "io", gains=found("FlashAttention moves", "up to 9×", "on-chip reuse", "2–4× as fast")
    ),
    "recomputation": lambda: walkthrough(
        "memory", gains=found("extra memory O(N)", "20× less", "recomputing S and P")
    ),
    "fa2": lambda: walkthrough(
        gains=both(one_step("fa2", "fa1"), found("the same, of FA2", "FA2 about 2× as fast as FA1, "
                                                 "forward", "parallel over"))
    ),
    "fa3": lambda: walkthrough(
        "roofline",
        gains=both(one_step("fa3", "fa2"), found("FA3 1.5–2.0×", "FA3 1.5–1.75×", "FA3 at 740")),
    ),
    "all": lambda: walkthrough(
        "generations", "speedup", gains=found("GPT-2 trains", "BERT-large", "2.4× on long")
    ),
}  # fmt: skip
