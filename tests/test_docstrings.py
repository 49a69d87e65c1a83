"""The examples in the docstrings of public functions and classes run as they are shown.

Would catch a public function without an example, an example whose result is another one, and a
public module that no page of the site shows.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_ext

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "flash_ext",
    "flash_ext.dropout",
    "flash_ext.flash_attn",
    "flash_ext.flash_attn_interface",
    "flash_ext.fp8",
    "flash_ext.integrations.distributed",
    "flash_ext.integrations.sdpa",
    "flash_ext.integrations.transformers",
    "flash_ext.reference",
)
# In modules without __all__: what others call in place of the user.
HOOKS = {"flash_ext.integrations.sdpa.Handle"} | {
    f"flash_ext.integrations.transformers.{name}" for name in ("attention_forward", "mask")
}


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """The functions and classes of __all__, or without it those that the module defines."""
    own = [n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", own):
        full, value = f"{module.__name__}.{name}", getattr(module, name)
        hidden = name.startswith("_") or full in HOOKS
        if not hidden and (inspect.isfunction(value) or inspect.isclass(value)):
            yield full, value


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A default group for the examples of context parallelism."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example_that_runs(name: str, one_rank: None) -> None:
    if name.endswith(".transformers"):
        pytest.importorskip("transformers")
    found = dict(public(import_module(name)))
    assert found
    wrong: list[str] = []
    for full, value in found.items():
        (test,) = doctest.DocTestFinder(recurse=False).find(
            value, full, globs={"torch": torch, "flash_ext": flash_ext}
        )
        if not test.examples:
            wrong.append(f"{full} has no example")
        doctest.DocTestRunner(verbose=False).run(test, out=wrong.append)
    assert not wrong, "".join(wrong)


def test_the_site_shows_every_public_module() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    shown: list[str] = []
    for page in (ROOT / "docs/api").glob("*.md"):
        assert f"- api/{page.name}\n" in site
        shown += re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    assert set(MODULES) <= set(shown)
