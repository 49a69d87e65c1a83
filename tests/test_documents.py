"""The documents: numbers are generated, links lead somewhere, and readers' pages are short.

Would catch a number typed into a document, a dead link, an option that no document has, and a page
for readers that grows.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import flash_ext

ROOT = Path(__file__).resolve().parent.parent
# All but docs/notes, which are logs of development, and say so.
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "notes"
]
GENERATED = re.compile(r"<!-- generated:(.*?) begin -->.*?<!-- generated:\1 end -->", re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def typed_measurements(text: str) -> list[str]:
    """Numbers with a unit of speed, time or share, outside of generated parts and code."""
    text = GENERATED.sub("", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    units = r"(?:×|%|\s?(?:TFLOP|TB/s|ms|µs|us|tokens/s)\b)"
    return re.findall(rf"\d[\d.,]*\s?{units}", text)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_documents_have_no_typed_measurement(path: Path) -> None:
    if path.parent.name != "benchmarks":  # generated whole
        assert not typed_measurements(path.read_text())


def test_what_counts_as_typed() -> None:
    begin, end = (f"<!-- generated:x {word} -->" for word in ("begin", "end"))
    generated = f"{begin}\n2.5×\n{end}"
    assert not typed_measurements(f"1,024 keys\n{generated}\n```\n7 ms\n```\n")
    assert typed_measurements(f"is 2.5× as fast\n{generated}, 700 TFLOP/s, 12 µs, 3 %") == [
        "2.5×", "700 TFLOP", "12 µs", "3 %",
    ]  # fmt: skip


def test_pages_for_readers_are_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert "TFLOP/s" in text and "](docs/figures/" in text, "a line and curves of speed"
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "not reached" not in text and "goal" not in text, "goals are the team's"


def test_the_changelog_has_this_version() -> None:
    version = flash_ext.__version__
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_every_option_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "options.md").read_text(), re.M)
    parameters = inspect.signature(flash_ext.attention).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert rows == sorted(names, key=lambda name: name == "return_lse")  # which is the last row


def anchors(text: str) -> set[str]:
    """Those that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(path: Path, text: str) -> list[str]:
    """Targets that do not exist: files, and headings in them."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        name, _, anchor = target.partition("#")
        if name.startswith(("http://", "https://")):
            continue
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            dead.append(target)
    return dead


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "docs/notes").glob("*.md"))], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    assert not dead_links(path, path.read_text())


def test_what_is_a_dead_link() -> None:
    text = "[a](LICENSE) [b](README.md#use) [c](https://x.y) [d](none.md) [e](README.md#none)"
    assert dead_links(ROOT / "README.md", text) == ["none.md", "README.md#none"]


def test_every_page_is_reached_from_the_front_page() -> None:
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        links = {
            (page.parent / target).resolve()
            for page in new
            for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
        }
        new = {link for link in links if link.is_file()} - found
    assert set(PAGES) <= found
