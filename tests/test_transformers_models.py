"""The models of transformers with flash_ext against the same with eager attention.

Would catch a model that does with its mask what the integration does not expect, or tells attention
what it does not know: each must agree, or be refused. No architecture is named here. How many are
right and refused: pytest -rP tests/test_transformers_models.py -k count
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.5", reason="needs transformers 5")

import transformers_models  # noqa: E402
from transformers_models import BATCH, SEQLEN, padding  # noqa: E402

from flash_ext.integrations import transformers as fa_ext  # noqa: E402

TOLERANCE = 1e-3
"""Of the largest entry, in float32. What was wrong differed by 0.05 to 1."""
FEWEST_RIGHT = 300
"""Of about 360 in transformers 5.23: fewer mean that models are no longer built here."""
BACKWARD = 4
"""One of this many models is run backward as well."""

CLASSES = sorted(transformers_models.classes())

pytestmark = pytest.mark.filterwarnings("ignore")  # of models' own, and of masks used as tensors


class Outcome(NamedTuple):
    """What became of a model: right, refused, wrong or not run; and why."""

    what: str
    why: str = ""


def run(model: nn.Module, inputs: dict, backward: bool = False) -> dict[str, Tensor]:
    """The outputs, and the gradients of all parameters."""
    torch.manual_seed(3)  # of models that draw numbers
    with torch.set_grad_enabled(backward):
        found = transformers_models.tensors(model(**inputs))
    outputs = [x for x in found.values() if x.requires_grad]
    if outputs:
        model.zero_grad()
        weights = torch.Generator().manual_seed(4)
        sums = [(x * torch.randn(x.shape, generator=weights)).sum() for x in outputs]
        torch.stack(sums).sum().backward()
        gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        found |= {name: x for name, x in gradients.items() if x is not None}
    return {name: x.detach() for name, x in found.items()}


def difference(
    actual: dict[str, Tensor], expected: dict[str, Tensor], padded: bool
) -> tuple[float, str]:
    """The largest relative error of the tokens that are not padding, and where it is."""
    worst = 0.0, ""
    gradients = [x.abs().max() for name, x in expected.items() if name.startswith("gradient")]
    for name, x in expected.items():
        if name not in actual:
            if "attention" in name:  # probabilities, which are never returned
                continue
            return float("inf"), f"no {name}"
        apart = actual[name] - x
        if padded and x.shape[:2] == (BATCH, SEQLEN):
            apart, x = apart[padding().bool()], x[padding().bool()]
        if x.numel():
            # Some gradients are 0 except for rounding errors: those of biases of keys.
            least = 1e-3 * max(gradients) if name.startswith("gradient") else 1e-6
            found = float(apart.abs().max() / x.abs().max().clamp(min=float(least)))
            worst = max(worst, (float("inf") if found != found else found, name))
    return worst


def inputs_that_run(model: nn.Module) -> tuple[int, bool, dict[str, Tensor]]:
    """Which of its inputs a model takes, whether they can be padded, and what it makes of them.

    Raises:
        Exception: the first error, where it takes none.
    """
    errors = []
    for number, inputs in enumerate(transformers_models.inputs_of(model)):
        try:
            found = run(model, inputs)
        except Exception as error:
            errors.append(error)
        else:
            padded = list(transformers_models.inputs_of(model, padded=True))[number]
            return number, "attention_mask" in padded, found
    raise errors[0] if errors else TypeError("it takes other inputs")


def refusal(error: Exception) -> Outcome:
    """Refused by flash_ext, or by a model that knows no attention but transformers'."""
    own = isinstance(error, KeyError) and error.args == (fa_ext.NAME,)
    clear = own or str(error).startswith("flash_ext: ")
    return Outcome("refused" if clear else "wrong", f"{type(error).__name__}: {error}")


def is_as_sdpa(name: str, actual: dict[str, Tensor], inputs: dict, backward: bool) -> bool:
    """Whether the model, which is not as with eager attention, is as with transformers' default."""
    try:
        expected = run(transformers_models.build(name, "sdpa"), inputs, backward)
    except ValueError:  # it does not support SDPA
        return False
    return difference(actual, expected, padded=False)[0] <= TOLERANCE


def outcome(name: str) -> Outcome:
    """Of the model of this class, with and without padding."""
    fa_ext.register()
    try:
        eager = transformers_models.build(name, "eager")
        number, can_pad, plain = inputs_that_run(eager)
    except Exception as error:
        return Outcome("not run", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    try:
        model = transformers_models.build(name, fa_ext.NAME)
    except Exception as error:
        return refusal(error)
    for padded in (False, True) if can_pad else (False,):
        inputs = list(transformers_models.inputs_of(eager, padded))[number]
        backward = not padded and CLASSES.index(name) % BACKWARD == 0
        try:
            expected = run(eager, inputs, backward) if padded or backward else plain
        except Exception as error:
            if padded:  # it has no use for padding
                break
            return Outcome("not run", f"{type(error).__name__}: {error}")
        if not all(x.isfinite().all() for x in expected.values()):
            return Outcome("not run", "eager gives NaN or inf")
        try:
            actual = run(model, inputs, backward)
        except Exception as error:
            return refusal(error)
        worst, where = difference(actual, expected, padded)
        if worst <= TOLERANCE:
            continue
        if padded:
            other = list(transformers_models.inputs_of(eager, padded, other=True))[number]
            if difference(run(eager, other), expected, padded)[0] > TOLERANCE:
                return Outcome("right", "without padding, whose tokens count in eager as well")
        elif is_as_sdpa(name, actual, inputs, backward):
            return Outcome("right", "as SDPA, from which eager attention differs")
        return Outcome("wrong", f"{where}: {worst:.2e}{', padded' if padded else ''}")
    return Outcome("right")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """`outcome`, of which the processes of pytest-xdist find each once."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "outcomes"
    folder.mkdir(exist_ok=True)

    def find(name: str) -> Outcome:
        path = folder / f"{name}.json"
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(outcome(name)))
            partial.replace(path)
        return Outcome(*json.loads(path.read_text()))

    return find


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Without a look for weights elsewhere, and what is said of configurations as these."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("name", CLASSES)
def test_model(name, outcomes):
    found = outcomes(name)
    if found.what == "not run":
        pytest.skip(found.why)
    assert found.what in ("right", "refused"), found.why


@pytest.mark.share(0)
def test_count(outcomes):
    found = {name: outcomes(name) for name in CLASSES}
    counts = Counter(x.what for x in found.values())
    lines = [f"transformers {transformers.__version__}, {len(found)} classes"]
    for what in ("right", "refused", "wrong", "not run"):
        lines.append(f"{what}: {counts[what]}")
        whys = {name: x.why for name, x in found.items() if x.what == what and x.why}
        if what != "not run":
            lines += [f"    {name}: {why}" for name, why in whys.items()]
        else:
            reasons = Counter(why.split(":")[0] for why in whys.values())
            lines += [f"    {reason}: {count}" for reason, count in reasons.most_common()]
    summary = "\n".join(lines)
    print(summary)
    assert counts["wrong"] == 0 and counts["right"] >= FEWEST_RIGHT, summary
