"""The examples' command lines: what cannot work is refused before anything is trained.

Would catch a mistake in an option that ends in a traceback, or after the training, whose results
are lost then.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_testing import VARIANTS
from torch.overrides import TorchFunctionMode

import flash_ext

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

import cudnn_nan  # noqa: E402
import generate  # noqa: E402
import pairformer  # noqa: E402
import train_gpt  # noqa: E402

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--seq", "16", "--batch", "1"]


def gpt(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """train_gpt.py with these arguments."""
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", *map(str, arguments)])
    return train_gpt.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--steps", 0), "--steps: must be at least 1, got 0"),
        (("--heads", 0), "--heads: must be at least 1, got 0"),
        (("--heads", 3), "--width 128 must be a multiple of --heads 3"),
        (("--kv-heads", 3), "--heads 4 must be a multiple of --kv-heads 3"),
        (("--heads", 1, "--width", 512), "head dimension must be 1 to 256"),
        (("--variant", "fa3"), "--variant fa3: "),
        (("--out", "curves.xyz"), "--out curves.xyz: a picture can be one of "),
        (("--out", Path(__file__) / "curves.png"), "no folder for "),
        (("--json", Path(__file__) / "losses.json"), "no folder for "),
    ),
)
def test_what_does_not_work_is_refused(
    arguments: tuple[object, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    if "xyz" in message:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(train_gpt, "train", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(SystemExit, match="2"):
        gpt(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_loses_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plot(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(train_gpt, "plot", plot)
    monkeypatch.setattr(train_gpt, "variants_table", lambda config: {})
    out, losses = tmp_path / "pictures" / "a.png", tmp_path / "results" / "a.json"
    with pytest.raises(OSError, match="no space left"):
        gpt(monkeypatch, *SMALL, "--steps", 1, "--out", out, "--json", losses)
    assert [len(run["losses"]) for run in json.loads(losses.read_text())["runs"]] == [1, 1]
    assert out.parent.is_dir()


def serve(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """generate.py with these arguments."""
    monkeypatch.setattr(sys, "argv", ["", *map(str, arguments)])
    return generate.main()


@pytest.mark.parametrize("page_size", (16, 5))
def test_generation_with_and_without_a_cache(
    page_size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The same tokens, though all prompts together need more pages than there are; and
    a prefix of which half is not seen is found."""
    small = ("--device", "cpu", "--prompts", 5, "--tokens", 8, "--page-size", page_size)
    small = (*small, "--pages", 100 // page_size, "--compare", 5)
    assert serve(monkeypatch, *small) == 0
    assert "same tokens: 5 of 5" in capsys.readouterr().out
    right = flash_ext.attention_with_shared_prefix

    def wrong(q: torch.Tensor, *keys: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(q, *keys, **options, prefix_seqlen=keys[0].shape[0] // 2)

    monkeypatch.setattr(flash_ext, "attention_with_shared_prefix", wrong)
    assert serve(monkeypatch, *small) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--tokens", 0), "--tokens: must be at least 1"),
        (("--width", 100), "--width: must be a multiple of 64, got 100"),
    ),
)
def test_a_generation_that_does_not_work_is_refused(
    arguments: tuple[object, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def test_a_prompt_without_enough_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a request needs more pages than there are"):
        serve(monkeypatch, "--device", "cpu", "--pages", 1)


@pytest.mark.gpu
def test_generation_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve(monkeypatch, "--prompts", 20, "--tokens", 30, "--pages", 40) == 0


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--heads", "3"), "--width 64 must be a multiple of --heads 3"),
        (("--kv-heads", "3"), "--heads 4 must be a multiple of --kv-heads 3"),
        (("--steps", "0"), "--steps: must be at least 1, got 0"),
    ),
)
def test_a_long_training_is_refused_before_ranks_meet(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    import train_long

    def meet(*_: object) -> None:
        pytest.fail("the process group was started")

    monkeypatch.setattr(train_long.dist, "init_process_group", meet)
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit, match="2"):
        train_long.main()
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_kv_heads_follow_the_heads() -> None:
    import train_long

    for heads, kv_heads in ((32, 8), (64, 8), (12, 4), (6, 2), (7, 1)):
        assert train_long.config_of("cuda", heads=heads).kv_heads == kv_heads
    assert train_long.config_of("cpu", heads=2).kv_heads == 2
    assert train_long.config_of("cuda", heads=6, kv_heads=3).kv_heads == 3


def test_the_nan_of_cudnn_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [""])
    assert cudnn_nan.main() == 2
    assert "needs a GPU" in capsys.readouterr().err


SMALL_PROJECTION = argparse.Namespace(batch=1, tokens=101, heads=2, head_dim=64, rounds=2)


class Instead(TorchFunctionMode):
    """SDPA is another function of (q, k, v), which gets SDPA first."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(func, *args)


def test_gradients_without_a_nan_are_right() -> None:
    """Torch's own on a CPU; and a NaN is found."""
    tensors = cudnn_nan.inputs(SMALL_PROJECTION, "cpu")
    for rows_after in (0, cudnn_nan.ROWS_AFTER):
        found = cudnn_nan.measure(cudnn_nan.BACKENDS["default"], *tensors, 2, rows_after)
        assert found.is_right and found.node.startswith("ScaledDotProduct")

    def with_nan(sdpa: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v) + k.square().sqrt().sum() * 0  # no derivative at 0

    tensors[0][0, 50, 1] = 0.0
    found = cudnn_nan.measure(functools.partial(Instead, with_nan), *tensors, 2, 0)
    assert found.rounds_with_nan == 2 and found.with_nan == {"dk"} and not found.is_right


@pytest.mark.gpu
@pytest.mark.parametrize("rows_after", (0, cudnn_nan.ROWS_AFTER))
@pytest.mark.parametrize("tokens", (1101, 4608))
@pytest.mark.parametrize("variant", ("activated", *VARIANTS))
def test_flash_ext_beside_nan(variant: str, tokens: int, rows_after: int) -> None:
    """Shapes of FLUX, where cuDNN's backward reads past the end of a tensor."""
    args = argparse.Namespace(batch=1, tokens=tokens, heads=8, head_dim=128)

    def attend(sdpa: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return flash_ext.attention(*rows, variant=variant).transpose(1, 2)

    backend = cudnn_nan.BACKENDS["flash_ext"]
    if variant in VARIANTS:
        backend = functools.partial(Instead, attend)
    tensors = cudnn_nan.inputs(args, "cuda")
    found = cudnn_nan.measure(backend, *tensors, 5, rows_after)
    assert found.is_right, found


def test_pairformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It compares, and it uses the triangle attention that it shows."""
    monkeypatch.setattr(sys, "argv", ["", "--tokens", "8", "--blocks", "1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pairformer.main() == 0
    assert "flash_ext: loss" in capsys.readouterr().out
    wrong = functools.partial(flash_ext.triangle_attention, scale=5.0)
    monkeypatch.setattr(flash_ext, "triangle_attention", wrong)
    assert pairformer.main() == 1 and "TOO LARGE" in capsys.readouterr().out
