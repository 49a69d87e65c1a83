"""flash_ext where torch lacks a private name: it imports, and gives the same results.

Would catch a rename in a release of torch that breaks `import flash_ext`, or a substitute that
recurses, casts twice, or records no gradient. Each name in turn, and all of them, are hidden from
`flash_ext/ops/torch_private.py` while flash_ext is imported, in a process of its own.
`test_layers.py` sees to it that no other file has private names.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from forked import run_python

from flash_ext.ops import torch_private

NAMES = re.findall(r'_find\(\s*"([\w.]+)"\s*\)', Path(torch_private.__file__).read_text())
NEEDED_BY_TORCH_FUNC = {
    "torch.autograd.function._SingleLevelFunction",
    "torch._functorch.utils.enable_single_level_autograd_function",
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
}

# Torch is imported once, and flash_ext in a fork for each case.
SCRIPT = """
import gc, json, os, pkgutil, sys, traceback, warnings
import torch
import torch._dynamo  # as torch.func does, once instead of in each fork
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode


def hide(paths):
    resolve_name = pkgutil.resolve_name

    def resolve_other(path):
        if path in paths:
            raise AttributeError(path)
        return resolve_name(path)

    pkgutil.resolve_name = resolve_other


def gradients(attend, *tensors):
    tensors = [x.clone().requires_grad_() for x in tensors]
    out = attend(*tensors)
    return [out.detach(), *torch.autograd.grad(out.sum(), tensors)]


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def same(function, *arguments):
    "True where function returns what is expected, the last of the arguments."

    def compare():
        *given, expected = arguments
        torch.testing.assert_close(function(*given), expected)
        return True

    return outcome(compare)


def check():
    import flash_ext
    from flash_ext.ops import torch_private

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 2, 8, dtype=torch.float64).unbind()
    one = torch.ones((), dtype=q.dtype)
    expected = gradients(lambda *x: flash_ext.reference.attention(*x)[0], q, k, v)

    def op(*tensors):
        return torch.ops.flash_ext.fwd(*tensors)[0]

    yield "missing", torch_private.missing
    for name, attend in ("attention", flash_ext.attention), ("op", op):
        with torch.no_grad():
            yield f"{name}: forward", same(attend, q, k, v, expected[0])
        yield f"{name}: backward", same(gradients, attend, q, k, v, expected)
        with torch.autocast("cpu", torch.bfloat16):
            half = gradients(attend, *(x.float() for x in (q, k, v)))
            again = gradients(attend, *(x.float() for x in (q, k, v)))
        yield f"{name}: autocast", [str(x.dtype) for x in half]
        yield f"{name}: autocast, again", same(lambda: again, half)
        with FlopCounterMode(display=False) as counter:
            gradients(attend, q, k, v)
        yield f"{name}: FLOPs", counter.get_total_flops()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where vmap has no rule
            mapped = torch.stack([k, q, v])
            yield f"{name}: vmap", same(
                lambda: torch.vmap(lambda x: attend(x, k, v))(mapped)[1], expected[0]
            )
        x = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(attend(x, k, v).sum(), x, create_graph=True)
        yield f"{name}: twice", outcome(torch.autograd.grad, first.sum(), x)
        with forward_ad.dual_level():
            yield f"{name}: tangents", outcome(attend, forward_ad.make_dual(q, q), k, v)
            yield f"{name}: no tangents", same(gradients, attend, q, k, v, expected)

        def total(x):
            return attend(x, k, v).sum()

        yield f"{name}: torch.func", same(torch.func.grad(total), q, expected[1])
        yield f"{name}: torch.func within", same(
            torch.func.grad(lambda x: torch.func.grad(lambda s: s * total(x))(one)),
            q,
            expected[1],
        )


# More imports. No backward, whose threads would not outlive a fork.
with forward_ad.dual_level():
    forward_ad.make_dual(torch.ones(1), torch.ones(1))
torch.vmap(torch.sum)(torch.ones(1, 1))
gc.freeze()

for case in sys.argv[1:]:
    if os.fork() == 0:
        results = {}
        try:
            hide(case.split())
            for name, result in check():
                results[name] = result
        except BaseException:
            results["error"] = traceback.format_exc()
        print(json.dumps([case, results]), flush=True)
        os._exit(0)
    os.wait()
"""


def outcomes(*cases: str) -> dict[str, dict]:
    """By case, the names that are hidden, what was found: empty, nothing is hidden."""
    root = str(Path(torch_private.__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    found = run_python("-c", SCRIPT, *cases, env=environment, check=True)
    return dict(json.loads(line) for line in found.stdout.splitlines())


ALL = " ".join(NAMES)


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    return outcomes("", *NAMES, ALL)


def test_torch_has_them(found: dict) -> None:
    """Otherwise flash_ext works without it, at a cost: see what torch has in its place."""
    wrong = {name: x for name, x in found[""].items() if x is not True}
    assert NAMES and wrong.pop("missing") == torch_private.missing == []
    for attend in "attention", "op":
        dtypes = wrong.pop(f"{attend}: autocast")
        assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32", "torch.float32"]
        assert wrong.pop(f"{attend}: FLOPs") == 7 * 2 * (2 * 2 * 9 * 9 * 8)
        assert "gradient of a gradient is not" in wrong.pop(f"{attend}: twice")
        assert "forward-mode derivatives" in wrong.pop(f"{attend}: tangents")
    assert wrong == {}


@pytest.mark.parametrize("case", (*NAMES, ALL), ids=lambda case: "all" if case == ALL else case)
def test_without_it_the_results_are_the_same(case: str, found: dict) -> None:
    hidden = case.split()
    expected = found[""] | {"missing": hidden}
    if NEEDED_BY_TORCH_FUNC & set(hidden):
        for name, result in found[case].items():
            if "torch.func" in name:
                assert "setup_context" in result
                expected[name] = result
    assert found[case] == expected
