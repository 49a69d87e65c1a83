"""explain: says what would run, and for what would not, the same reason that running gives.

Would catch an explanation that disagrees with `attention`, a CPU-only install that does not say
what is missing and how to get it, SDPA's layout that goes unnoticed, and alarms about plain calls.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from attention_testing import VARIANTS, Problem, device_unsupported_reason, fastest
from forked import run_python
from torch._subclasses import FakeTensorMode

import flash_ext
from flash_ext import ops
from flash_ext.__main__ import main
from flash_ext.ops import torch_private


def some_inputs(device: str, **make) -> list[torch.Tensor]:
    make = {"dtype": torch.bfloat16} | make
    return [torch.randn(1, 8, 2, 64, device=device, **make) for _ in range(3)]


def test_what_runs(device: str) -> None:
    explanation = flash_ext.explain(*some_inputs(device), causal=True)
    assert explanation.variant == explanation.backward == fastest(Problem(), device)
    assert explanation.why_backward is None
    assert tuple(explanation.reasons) == VARIANTS
    for variant, reason in explanation.reasons.items():
        expected = device_unsupported_reason(variant, device)
        assert reason is None if expected is None else expected in reason
    assert device in explanation.device
    assert explanation.copied is None
    copied = dataclasses.replace(explanation, copied="q, k")
    assert "; rows of q, k are copied to aligned memory first\n" in str(copied)
    text = str(explanation)
    assert len(text.splitlines()) >= 5 and "copied" not in text
    assert all(word in text for word in (*VARIANTS, device))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_named_variant(variant: str, device: str) -> None:
    assert flash_ext.explain(*some_inputs(device), variant=variant).variant == variant


@pytest.mark.parametrize(
    ("argument", "options"),
    (
        ("softcap", {"softcap": -3.0}),
        ("bias", {"bias": torch.zeros(9, 8, dtype=torch.bool)}),
        ("window_left", {"window": (-3, 0)}),
        ("dropout_p", {"dropout_p": 1.0}),
        ("variant", {"variant": "fa9"}),
    ),
)
def test_why_not(argument: str, options: dict, device: str) -> None:
    inputs = some_inputs(device)
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    explanation = flash_ext.explain(*inputs, **options)
    assert explanation.variant is explanation.backward is explanation.why_backward is None
    with pytest.raises((ValueError, RuntimeError), match=argument):
        flash_ext.attention(*inputs, **options)
    assert f"{argument} must be" in str(explanation)
    if argument != "variant":
        assert all(argument in reason for reason in explanation.reasons.values())
    else:  # what there is may run, but was not asked for
        assert tuple(explanation.reasons) == (*VARIANTS, "fa9")
        assert "variant must be 'auto' or 'fa1' or" in explanation.reasons["fa9"]


def test_bad_tensors_are_explained_too(device: str) -> None:
    q, k, v = some_inputs(device)
    explanation = flash_ext.explain(q, k[:, :, :, :32], v)
    assert explanation.variant is None
    assert all(reason.startswith("k must be") for reason in explanation.reasons.values())


@pytest.mark.parametrize("packed", (False, True))
def test_every_option_is_taken(packed: bool, device: str) -> None:
    inputs = some_inputs(device)
    attention = flash_ext.attention
    options = {
        "scale": 0.5,
        "causal": True,
        "window": (3, 0),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(2, device=device),
        "bias": torch.randn(8, device=device),
        "sink": torch.randn(2, device=device, dtype=torch.float16),
        "seqused_k": torch.tensor([5], dtype=torch.int32, device=device),
        "dropout_p": 0.1,
        "rng_state": torch.zeros(2, dtype=torch.int64, device=device),
        "deterministic": True,
        "variant": "auto",
        "return_lse": True,
    }
    if packed:
        cu_seqlens = torch.tensor([0, 8], dtype=torch.int32, device=device)
        inputs = [*(x[0] for x in inputs), cu_seqlens, cu_seqlens]
        attention = flash_ext.attention_varlen
    assert set(options) < set(inspect.signature(attention).parameters)
    attention(*inputs, **options)
    assert flash_ext.explain(*inputs, **options).variant is not None


def test_both_functions_have_the_same_options() -> None:
    dense, packed = (
        {
            name: (parameter.kind, parameter.default)
            for name, parameter in inspect.signature(function).parameters.items()
        }
        for function in (flash_ext.attention, flash_ext.attention_varlen)
    )
    added = {name: packed.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert dense == packed and all(
        default is inspect.Parameter.empty for _, default in added.values()
    )


def test_packed_inputs_without_their_offsets_are_explained(device: str) -> None:
    explanation = flash_ext.explain(*(x[0] for x in some_inputs(device)))
    assert explanation.variant is None
    assert all("cu_seqlens" in reason for reason in explanation.reasons.values())


def test_explaining_draws_no_random_numbers(device: str) -> None:
    inputs = some_inputs(device)
    torch.manual_seed(1)
    expected = flash_ext.attention(*inputs, dropout_p=0.5)
    torch.manual_seed(1)
    flash_ext.explain(*inputs, dropout_p=0.5)
    assert torch.equal(flash_ext.attention(*inputs, dropout_p=0.5), expected)


def test_an_unknown_option_is_an_error(device: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match="causl"):
        flash_ext.explain(*some_inputs(device), causl=True)


def test_says_whether_the_cuda_kernels_are_there() -> None:
    binary = flash_ext.explain(*some_inputs("cpu")).binary
    if Path(flash_ext.__file__).with_name("_C.abi3.so").exists():
        assert binary == "loaded"
    else:
        assert "not built" in binary and "pip install" in binary


@pytest.mark.parametrize("kind", ("meta", "fake"))
@pytest.mark.parametrize("name", ("q", "v", "sink"))
def test_tensors_without_elements_are_explained(name: str, kind: str, device: str) -> None:
    arguments = dict(zip("qkv", some_inputs(device), strict=True))
    arguments["sink"] = torch.zeros(2, device=device)
    if kind == "meta":
        arguments[name] = arguments[name].to("meta")
    else:
        arguments[name] = FakeTensorMode().from_tensor(arguments[name])
    explanation = flash_ext.explain(**arguments)
    assert explanation.variant is explanation.backward is None
    expected = f"{name} must be on a CPU or a CUDA device, got a {kind} tensor"
    assert set(explanation.reasons.values()) == {expected}
    if name == "q" and kind == "meta":
        assert explanation.device == "meta"


@pytest.mark.gpu
def test_float32_on_cuda_is_explained() -> None:
    explanation = flash_ext.explain(*some_inputs("cuda", dtype=torch.float32))
    assert explanation.variant is None
    assert all("q must be" in reason for reason in explanation.reasons.values())


# --- The layout ---

PLAIN = (  # q, k
    ((2, 1024, 16, 64), (2, 1024, 16, 64)),
    ((2, 8, 128, 64), (2, 8, 1, 64)),  # few tokens of many heads
    ((4, 1, 128, 64), (4, 9000, 8, 64)),  # decoding
    ((1, 1, 64, 64), (1, 1, 8, 64)),
    ((1, 100, 6, 64), (1, 100, 4, 64)),  # refused for another reason
    ((1, 4096, 200, 64), (1, 4096, 200, 64)),
)
SWAPPED = (
    ((2, 32, 1024, 64), (2, 32, 1024, 64)),
    ((2, 32, 1024, 64), (2, 8, 1024, 64)),
    ((2, 8, 4096, 64), (2, 8, 77, 64)),
    ((2, 8, 100, 64), (2, 8, 77, 64)),  # refused, and would run
)


@pytest.mark.parametrize(("swapped", "shapes"), [
    *((False, s) for s in PLAIN), *((True, s) for s in SWAPPED)
])  # fmt: skip
def test_layout(swapped: bool, shapes: tuple, device: str) -> None:
    q, k = (torch.empty(s, device=device, dtype=torch.bfloat16) for s in shapes)
    explanation = flash_ext.explain(q, k, k)
    assert (explanation.layout is not None) == swapped
    assert ("transpose(1, 2)" in str(explanation)) == swapped
    if swapped:
        turned = flash_ext.explain(*(x.transpose(1, 2) for x in (q, k, k)))
        assert turned.layout is None and turned.variant is not None


def test_layout_of_packed_sequences(device: str) -> None:
    q = torch.empty(1000, 16, 64, device=device, dtype=torch.bfloat16)
    for x, last in ((q, 1000), (q.transpose(0, 1), 16)):
        cu_seqlens = torch.tensor([0, last], dtype=torch.int32, device=device)
        layout = flash_ext.explain(x, x, x, cu_seqlens, cu_seqlens).layout
        assert layout is None if last == 1000 else "transpose(0, 1)" in layout


def test_a_variant_that_does_not_run_is_no_matter_of_layout() -> None:
    explanation = flash_ext.explain(*some_inputs("cpu"), variant="fa3")
    assert explanation.variant is None and explanation.layout is None


# --- python -m flash_ext ---


def test_command_line(device: str, capsys: pytest.CaptureFixture) -> None:
    arguments = "--q 1 5 4 64 --k 1 7 2 64 --v 1 7 2 32 --causal --window 3 0 --softcap 2 --alibi"
    arguments += f" --bias --sink --dropout-p 0.1 --device {device}"
    assert main(arguments.split()) == 0
    text = capsys.readouterr().out
    for words in (flash_ext.__version__, torch.__version__, "(1, 7, 2, 32)", *VARIANTS):
        assert words in text
    expected = flash_ext.explain(
        torch.empty(1, 5, 4, 64, device=device, dtype=torch.bfloat16),
        *(torch.empty(1, 7, 2, d, device=device, dtype=torch.bfloat16) for d in (64, 32)),
        causal=True, window=(3, 0), softcap=2.0, dropout_p=0.1,
        alibi_slopes=torch.empty(4, device=device), sink=torch.empty(4, device=device),
        bias=torch.empty(1, 4, 5, 7, device=device, dtype=torch.bfloat16),
    )  # fmt: skip
    assert str(expected) in text


def test_command_line_names_what_torch_lacks(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "missing", ["torch._C._gone"])
    main(["--device", "cpu"])
    assert "slower without: torch._C._gone" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out-dtype", "foo"), "torch has no dtype 'foo'"),
        (("--q", "-1", "1", "1", "1"), "at least 0, got -1"),
    ],
)
def test_command_line_refuses(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_command_line_of_what_does_not_run(capsys: pytest.CaptureFixture) -> None:
    assert main(["--q", "1", "5", "4", "300", "--device", "cpu"]) == 1
    assert "head dimension must be 1 to 256" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA may be asked for")
@pytest.mark.parametrize(
    "program",
    (
        ("-m", "flash_ext"),
        ("examples/train_gpt.py",),
        ("benchmarks/compare.py",),
        ("benchmarks/options.py",),
        ("benchmarks/support.py",),
        ("benchmarks/train.py",),
    ),
    ids=" ".join,
)
def test_a_device_that_is_not_there(program: tuple) -> None:
    root = Path(flash_ext.__file__).parent.parent
    found = run_python(*program, "--device", "cuda", cwd=root)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert "error: " in found.stderr and "--device" in found.stderr.splitlines()[-1]


def test_run_as_a_module() -> None:
    root = Path(flash_ext.__file__).parent.parent
    found = run_python("-m", "flash_ext", "--device", "cpu", cwd=root, check=True)
    assert "flash_ext runs: fa2" in found.stdout


def test_targets_are_those_of_the_binary() -> None:
    assert (ops.cuda_targets() is None) == (ops.cuda_missing is not None)
