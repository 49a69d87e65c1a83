"""Whole models in training, with flash_ext in place of torch's attention and without it.

    python benchmarks/models.py                  # all of them, about a minute on an H200
    python benchmarks/models.py --model swin_base_patch4_window7_224
    python benchmarks/models.py --device cpu     # a smoke test

Swin and BEiT are timm's and T5, encoder and decoder, is transformers', unchanged: "flash_ext" is
the model under `sdpa.activate()`, "sdpa" with torch's own backends. The pairformer is
examples/pairformer.py, with `triangle_attention`, SDPA, and cuEquivariance's if it is installed.
Weights are random, in bfloat16; there is no dropout.

A step is forward, backward and AdamW, captured in a CUDA graph, so that the CPU's time does not
count. The steps take turns. A model whose first loss or gradients differ from sdpa's is called
wrong and is not timed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import common
import torch
import torch.nn.functional as F
from common import SHAPES, Json
from providers import Wrong, prepared
from timing import Timer
from torch import Tensor, nn

from flash_ext.integrations import sdpa
from flash_ext.triangle import triangle_attention

sys.path.append(str(common.ROOT / "examples"))
import pairformer  # noqa: E402

OURS, SDPA, CUEQUIVARIANCE = "flash_ext", "sdpa", "cuequivariance"
SIZES: dict[str, Json] = SHAPES["whole_models"]
LOSS_LIMIT, GRADIENT_LIMIT = 1e-2, 5e-2  # relative, of the loss and of all gradients in one
WARM_UP = 3


def model_and_inputs(name: str, device: torch.device, attend: str) -> tuple[nn.Module, Json]:
    """A model with random weights, and a batch."""
    size = SIZES[name] | (SIZES["cpu"].get(name, {}) if device.type == "cpu" else {})
    torch.manual_seed(0)
    if name == "pairformer":
        calls = {OURS: triangle_attention, SDPA: pairformer.sdpa}
        if attend == CUEQUIVARIANCE:
            calls[attend] = importlib.import_module("cuequivariance_torch").triangle_attention
        tokens = size.pop("tokens")
        model = pairformer.Pairformer(calls[attend], **size)
        return model, dict(zip("zs", model.inputs(tokens), strict=True))
    if name == "t5-base":
        transformers = importlib.import_module("transformers")
        # A captured step has the masks of an eager one: none.
        transformers.utils.import_utils.is_cuda_stream_capturing = lambda: False
        config = transformers.T5Config(**size["config"], attn_implementation="sdpa")
        ids = torch.randint(1, config.vocab_size, (2, size["batch"], size["tokens"]))
        return transformers.T5Model(config), {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    timm = importlib.import_module("timm")
    return timm.create_model(name), {"x": torch.randn(size["batch"], 3, 224, 224)}


class Trainee:
    """A model in training with one attention."""

    def __init__(self, name: str, device: torch.device, attend: str) -> None:
        with device:
            model, inputs = model_and_inputs(name, device, attend)
        self.model, self.cuda = model.to(torch.bfloat16), device.type == "cuda"
        self.inputs = {n: x.bfloat16() if x.is_floating_point() else x for n, x in inputs.items()}
        parameters = self.model.parameters()
        fast = {"fused": self.cuda, "capturable": self.cuda}
        self.optimizer = torch.optim.AdamW(parameters, 1e-5, **fast)
        self.targets: list[Tensor] = []

    def step(self) -> Tensor:
        """One step; returns the loss before it. The gradients stay."""
        self.optimizer.zero_grad()
        found = self.model(**self.inputs)
        outputs = (found,) if torch.is_tensor(found) else found[:2]
        if not self.targets:  # any numbers that do not depend on the attention
            self.targets = [torch.arange(x.numel(), device=x.device).sin().view_as(x)
                            for x in outputs]  # fmt: skip
        pairs = zip(outputs, self.targets, strict=True)
        loss = torch.stack([F.mse_loss(x.float(), y) for x, y in pairs]).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def first(self) -> list[Tensor]:
        """The loss of a step, and all gradients in one."""
        loss = self.step()
        found = [(x.grad if x.grad is not None else torch.zeros_like(x)).float().flatten()
                 for x in self.model.parameters()]  # fmt: skip
        return [loss, torch.cat(found)]

    def captured(self) -> Callable[[], object]:
        """A step to be timed."""
        if not self.cuda:
            return self.step
        stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.step()
        return self.replay

    def replay(self) -> None:
        """A captured step: a method, since the model must outlive the graph."""
        self.graph.replay()


def measure(name: str, device: torch.device, rounds: int) -> Json:
    """A step's time with each attention, or why there is none."""
    reference: list[Tensor] = []
    measured: Json = {}

    def prepare(attend: str) -> Callable[[], object]:
        active = attend == OURS and device.type == "cuda"
        around: AbstractContextManager[object] = sdpa.activated() if active else nullcontext()
        with around:
            trainee = Trainee(name, device, attend)
            found = trainee.first()
            reference.extend([] if reference else found)
            pairs = zip(found, reference, strict=True)
            loss, grads = (((x - y).norm() / y.norm()).item() for x, y in pairs)
            if not (loss <= LOSS_LIMIT and grads <= GRADIENT_LIMIT):
                raise Wrong(f"WRONG RESULT: loss off by {loss:.2g}, gradients by {grads:.2g}")
            measured[attend] = {"gradient_error": float(f"{grads:.2g}")}
            return trainee.captured()

    more = [CUEQUIVARIANCE] if name == "pairformer" else []
    calls, reasons = prepared({x: partial(prepare, x) for x in (SDPA, OURS, *more)})
    times = Timer(device).timed(calls, 0, rounds)
    others = [times[x]["ms"] for x in (SDPA, CUEQUIVARIANCE) if x in times]
    ratio = {"ratio": round(min(others) / times[OURS]["ms"], 4)} if others and OURS in times else {}
    return {"providers": reasons | {x: times[x] | measured[x] for x in times}} | ratio


def main() -> int:
    parser = common.parser(__doc__, device=True)
    names = [name for name in SIZES if name != "cpu"]
    parser.add_argument("--model", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    args = parser.parse_args()
    recorder = common.begin("models", args)
    for name in common.progress(args.model, len(args.model), "models"):
        recorder.add({"model": name}, measure(name, recorder.device, args.rounds))
        common.free_memory(recorder.device)
    # A failure of flash_ext, not of a model that is not installed.
    return recorder.close(lambda r: "ms" in r["providers"][SDPA] and "ratio" not in r)


if __name__ == "__main__":
    sys.exit(main())
