"""The code and the commands of the documents: each runs here, or says what runs it in its place.

Would catch an example that no longer runs, a command with an option that does not exist, and one
that is documented and that nobody runs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_documents import PAGES, ROOT, name_of

import flash_ext
from flash_ext import fp8

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# ---------------------------------------------------------------------------------------- Python
def snippets(path: Path) -> list[str]:
    return [code for language, code in FENCE.findall(path.read_text()) if language == "python"]


# Examples that need what is not here, by a word of theirs, and the tests that run the same.
ELSEWHERE = {
    "sdpa.activated": "test_sdpa.py",
    "PAGED_NAME": "test_transformers_batching.py",
    "AutoModelForCausalLM": "test_transformers.py",
    "get_local_kernel": "test_hub.py",
    "somebody/flash-ext": "test_hub.py",
    "init_device_mesh": "test_dtensor.py",
}


def given(path: Path) -> dict[str, Any]:
    """What the examples of a page have from their reader's program."""
    q, k, v = torch.randn(3, 2, 32, 4, 16, dtype=torch.bfloat16).unbind()
    found: dict[str, Any] = {"torch": torch, "flash_ext": flash_ext, "fp8": fp8}
    found |= {"q": q, "k": k[:, :, :2], "v": v[:, :, :2], "Hk": 2, "S": 32}
    if path.name == "walkthrough.md":
        found |= dict(zip("qkv", torch.randn(3, 1, 384, 1, 16), strict=True))
        found["q"] = found["q"][:, :256]
    if path.name == "options.md":
        found |= {"k_cache": torch.randn(6, 16, 2, 16), "v_cache": torch.randn(6, 16, 2, 16)}
        found |= {"k_new": torch.randn(2, 1, 2, 16), "v_new": torch.randn(2, 1, 2, 16)}
        found["page_table"] = torch.tensor([[5, 1], [0, 4]], dtype=torch.int32)
        found |= {"cos": torch.randn(32, 8), "sin": torch.randn(32, 8)}
        found |= {"table": torch.randn(4, 32, 32, dtype=q.dtype, requires_grad=True)}
        found["visible"] = torch.rand(2, 1, 1, 32) < 0.5
    if path.name == "integrations.md":
        found |= {"qkv": torch.nn.Linear(64, 192), "heads": 4, "head_dim": 16}
        found["x"] = torch.randn(2, 8, 64, requires_grad=True)
    if path.name == "distributed.md":
        found |= {n: torch.zeros(2, 32, dtype=torch.int64) for n in ("tokens", "labels")}
        found["logits"] = torch.randn(2, 32, 7)
    if path.name == "fp8.md":
        cu_seqlens = torch.tensor([0, 32], dtype=torch.int32)
        found |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return found


# What the same names are in another line of a page, by a word of the line.
BEFORE = {
    " flash_ext.attention_varlen(": "q = k = v = torch.randn(2712, 1, 8)",
    "attention_with_cache(": "q = torch.randn(2, 1, 4, 16); lengths = lengths[:2].int() % 15",
    "bias=table": "q, k, v = torch.randn(3, 2, 32, 4, 16, dtype=torch.bfloat16)",
    "Mask.documents(": "cu_seqlens = torch.tensor([0, 20, 32], dtype=torch.int32)",
    "def quantize(x)": "k, v = k[:, :, :2], v[:, :, :2]",
    " fp8.attention_varlen(": "q, k, v = q[0], k[0], v[0]",
    " fp8.random_signs(": "q, k, v = q[None], k[None], v[None]",
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("path", [p for p in PAGES if snippets(p)], ids=name_of)
def test_examples_run(path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, as a reader has them in one program; on the CPU."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # which one of them sets
    monkeypatch.setitem(torch.compile.__kwdefaults__, "backend", "eager")
    names = given(path)
    for code in snippets(path):
        elsewhere = [test for word, test in ELSEWHERE.items() if word in code]
        ast.parse(code)
        if elsewhere:
            assert all((ROOT / "tests" / test).is_file() for test in elsewhere)
            continue
        for word, line in BEFORE.items():
            code = re.sub(f"^.*{re.escape(word)}", rf"{line}\n\g<0>", code, count=1, flags=re.M)
        exec(code.replace('"cuda"', '"cpu"'), names)


# -------------------------------------------------------------------------------------- commands
PROGRAM = r"(?:[A-Z_]+=\S+ )?(?:make|python|pip|torchrun|nox|pre-commit)"
# What runs each command of the documents: a file of the repository, or why nothing does.
RUN_BY = {
    r"make (.* )?lint": ".github/workflows/test.yml",
    r"make (test|ARGS=--all-cases test)": "the same pytest is the workflow's, of another checkout",
    r"make( PYTHON=\S+ …)?|make build": "tests/test_install.py",  # its environment, its compiler
    r"make demo": "tests/test_examples.py",  # the script
    r"make wheel MACHINE=aarch64": "tests/test_distribution.py",
    r"make wheel": ".github/workflows/wheels.yml",
    r"make wheel hub( compat)?|make hub|make sdist": "tests/test_hub.py",
    r"make report": "tests/test_report.py",
    r"make docs": "not run: the site's tools are large; test_docstrings.py has its examples",
    r"make (release|compat)|nox -s complete": "not run: a release takes hours",
    r"make (gpu-test|soak|sanitize|bench|BENCH=tune bench|PY=python3 gpu-test)": "not run: a GPU",
    r'pip install ("setuptools.*ninja|.*-v \.|-e)': "tests/test_install.py",
    r"pip install --group dev": "tests/test_project_files.py",
    r"pip install dist/.*whl": "noxfile.py",
    r"pre-commit install": "not run: it changes the checkout; test_project_files.py has its pins",
    r"python -m flash_ext\.bench( .*)?": "tests/test_bench.py",
    r"python -m flash_ext( --q .*)?": "tests/test_explain.py",
    r"python benchmarks/digest.py": "tests/test_digest.py",
    r"python benchmarks/….py": "tests/test_benchmarks.py",
    r"python examples/cudnn_nan.py": "tests/test_examples.py",
    r"torchrun .* script.py|LOCAL_KERNELS=.* python serve.py": "not run: the reader's own script",
}


def documented_commands() -> Iterator[tuple[str, str]]:
    """(page, command): lines of blocks that are not Python, and code within text."""
    for path in PAGES:
        text = path.read_text()
        blocks = [body for language, body in FENCE.findall(text) if language != "python"]
        lines = [re.sub(r"^\$ |\s+#.*", "", x) for body in blocks for x in body.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        yield from ((name_of(path), x) for x in lines if re.match(rf"{PROGRAM}(?: |$)", x))


def test_each_documented_command_is_run_or_says_why_not() -> None:
    unused, unknown = set(RUN_BY), []
    for page, command in documented_commands():
        rules = [rule for rule in RUN_BY if re.fullmatch(rule, command)]
        unused -= set(rules)
        unknown += [] if len(rules) == 1 else [(page, command, rules)]
    assert not unknown and not unused
    for by in RUN_BY.values():
        assert " " in by or (ROOT / by).is_file(), by


def test_make_has_the_documented_targets_and_variables() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = " ".join(re.findall(r"^([\w-]+(?: [\w-]+)*):", makefile, re.MULTILINE)).split()
    for page, command in documented_commands():
        for word in command.split()[1:] if command.startswith("make ") else ():
            name, is_variable, _ = word.partition("=")
            known = f"$({name})" in makefile or f"{name} " in makefile if is_variable else (
                word in targets or word == "…")  # fmt: skip
            assert known, (page, command)


class Understood(Exception):
    """The options are right; nothing runs."""


SCRIPTS = [p for folder in ("benchmarks", "examples") for p in sorted((ROOT / folder).glob("*.py"))]


def commands_of(script: Path) -> list[list[str]]:
    """The options of each command in a script's docstring."""
    doc = ast.get_docstring(ast.parse(script.read_text())) or ""
    lines = re.findall(rf"^    (?:python|torchrun .*) \w+/{script.name}(.*)$", doc, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


# digest.py has no parser; test_digest.py runs it.
@pytest.mark.parametrize(
    "script", [p for p in SCRIPTS if commands_of(p) and p.stem != "digest"], ids=name_of
)
def test_scripts_understand_their_documented_commands(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def understood(parser: argparse.ArgumentParser, given: list[str] | None = None) -> None:
        parse(parser, given)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understood)
    monkeypatch.syspath_prepend(str(script.parent))
    main = importlib.import_module(script.stem).main
    for options in commands_of(script):
        monkeypatch.setattr(sys, "argv", [str(script), *options])
        with pytest.raises(Understood):
            main()
