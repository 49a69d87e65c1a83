"""The pins of pre-commit and the workflows are pyproject.toml's.

Would catch a tool that is pinned twice with different versions, and a workflow that tests another
torch or Python than the package promises.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS: dict[str, list[Any]] = PYPROJECT["dependency-groups"]
PINS = {x for group in GROUPS.values() for x in group if isinstance(x, str)}
CLASSIFIERS = " ".join(PYPROJECT["project"]["classifiers"])
PYTHONS = re.findall(r"Python :: (3\.\d+)", CLASSIFIERS)


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_every_tool_has_one_pin() -> None:
    """One for each range of Pythons, in whatever groups it is."""
    assert all(re.match(r"[\w-]+==\d", x) for x in PINS)
    tools = [(x.partition("==")[0], "".join(x.partition(";")[1:])) for x in PINS]
    assert len(tools) == len(set(tools)), sorted(PINS)


def test_pre_commit_has_the_same_pins() -> None:
    hooks = [x for repo in load(".pre-commit-config.yaml")["repos"] for x in repo["hooks"]]
    assert {x["id"] for x in hooks} == {"ruff-format", "ruff-check", "clang-format"}
    for hook in hooks:
        assert hook["language"] == "python"
        assert set(hook["additional_dependencies"]) <= set(GROUPS["lint"]), hook["id"]
        assert hook["additional_dependencies"], hook["id"]


def test_the_workflow_tests_the_oldest_and_the_pinned_torch() -> None:
    matrix = load(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    oldest = next(x for x in PYPROJECT["project"]["dependencies"] if x.startswith("torch>="))
    (pinned,) = GROUPS["torch"]
    assert matrix["torch"] == [
        oldest.removeprefix("torch>=") + ".0",
        pinned.removeprefix("torch=="),
    ]
    assert len(matrix["python"]) == 3 and set(matrix["python"]) <= set(PYTHONS)
    assert {matrix["python"][0], matrix["python"][-1]} == {PYTHONS[0], PYTHONS[-1]}


def test_the_pythons_are_those_of_the_tested_wheels() -> None:
    assert f">={PYTHONS[0]}" == PYPROJECT["project"]["requires-python"]
    assert set(PYTHONS) == {
        python for _, python in PYPROJECT["tool"]["flash_ext"]["compat"]["torch"]
    }


@pytest.mark.parametrize("name", ["test", "wheels"])
def test_workflows_name_groups_and_make_targets_that_exist(name: str) -> None:
    jobs = load(f".github/workflows/{name}.yml")["jobs"]
    commands = [x["run"] for job in jobs.values() for x in job["steps"] if "run" in x]
    lines = re.findall(r"^([\w./ -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = " ".join(lines).split()
    for command in commands:
        assert set(re.findall(r"--group (\S+)", command)) <= set(GROUPS), command
        assert set(re.findall(r"^make (\S+)", command)) <= set(targets), command


def test_make_installs_groups_that_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    wanted = set(re.findall(r"--group ([\w-]+)", text))
    assert wanted == {"torch", "dev", "cross"} <= set(GROUPS)


def test_a_citation_and_a_problem_can_be_filed() -> None:
    assert load("CITATION.cff")["license"] == PYPROJECT["project"]["license"]
    first = load(".github/ISSUE_TEMPLATE/problem.yml")["body"][0]
    assert "python -m flash_ext" in first["attributes"]["label"]
    assert first["validations"]["required"]
