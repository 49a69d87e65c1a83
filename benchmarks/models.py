"""Whole models in training, with flash_ext in place of torch's attention and without it.

    python benchmarks/models.py                  # all of them, about a minute on an H200
    python benchmarks/models.py --model swin_base_patch4_window7_224
    python benchmarks/models.py --device cpu     # a smoke test

Swin and BEiT are timm's and T5, encoder and decoder, is transformers', unchanged: "flash_ext" is
the model under `sdpa.activate()`, "sdpa" with torch's own backends, "eager" timm's own attention
(Swin's default: it calls SDPA only if TIMM_FUSED_ATTN is 2). The pairformer is
examples/pairformer.py, compiled, with `triangle_attention`, SDPA, and cuEquivariance's if it is
installed. Weights are random, in bfloat16; there is no dropout.

A step is forward, backward and AdamW, captured in a CUDA graph, so that the CPU's time does not
count. The steps take turns. A model whose first loss or gradients differ from sdpa's is called
wrong and is not timed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import common
import torch
from common import SHAPES, Json
from providers import Wrong, prepared
from timing import Timer
from torch import Tensor, nn

from flash_ext.integrations import sdpa
from flash_ext.triangle import triangle_attention

sys.path.append(str(common.ROOT / "examples"))
import pairformer  # noqa: E402

OURS, SDPA, EAGER, CUEQUIVARIANCE = "flash_ext", "sdpa", "eager", "cuequivariance"
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
    timm.layers.set_fused_attn(attend != EAGER, experimental=True)
    return timm.create_model(name), {"x": torch.randn(size["batch"], 3, 224, 224)}


def training(
    name: str, device: torch.device, attend: str
) -> tuple[Callable[[], Tensor], Iterable[Tensor]]:
    """A step of a new model, which returns the loss before it, and the model's parameters."""
    with device:
        model, inputs = model_and_inputs(name, device, attend)
    parameters = list(model.bfloat16().parameters())
    inputs = {n: x.bfloat16() if x.is_floating_point() else x for n, x in inputs.items()}
    cuda = device.type == "cuda"
    if cuda and name == "pairformer":  # its small layers otherwise take most of a step
        model.compile()
    optimizer = torch.optim.AdamW(parameters, 1e-5, fused=cuda, capturable=cuda)

    def step() -> Tensor:
        optimizer.zero_grad()
        found = model(**inputs)
        outputs = (found,) if torch.is_tensor(found) else found[:2]
        loss = torch.stack([(x.float() - 1).square().mean() for x in outputs]).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, parameters


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The same steps from a CUDA graph; the function keeps the model, which the graph reads."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda: (graph.replay(), step)


def measure(name: str, device: torch.device, rounds: int) -> Json:
    """A step's time with each attention, or why there is none."""
    reference: list[Tensor] = []
    measured: Json = {}

    def prepare(attend: str) -> Callable[[], object]:
        cuda = device.type == "cuda"
        active = cuda and attend == OURS
        with sdpa.activated() if active else nullcontext():
            step, parameters = training(name, device, attend)
            loss = step()
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in parameters]
            found = [loss, torch.cat([x.float().flatten() for x in grads])]
            reference.extend([] if reference else found)
            pairs = zip(found, reference, strict=True)
            of_loss, error = (((x - y).norm() / y.norm()).item() for x, y in pairs)
            if not (of_loss <= LOSS_LIMIT and error <= GRADIENT_LIMIT):
                raise Wrong(f"WRONG RESULT: loss off by {of_loss:.2g}, gradients by {error:.2g}")
            if active and error == 0:
                raise Wrong(f"WRONG: {name} has the same bits: it called nothing of flash_ext")
            measured[attend] = {"gradient_error": float(f"{error:.2g}")}
            return captured(step) if cuda else step

    more = {"pairformer": [CUEQUIVARIANCE], "t5-base": []}.get(name, [EAGER])
    calls, reasons = prepared({x: partial(prepare, x) for x in (SDPA, OURS, *more)})
    times = Timer(device).timed(calls, 0, rounds)
    result: Json = {"providers": reasons | {x: times[x] | measured[x] for x in times}}
    if SDPA in times and OURS in times:
        fastest = min(x["ms"] for other, x in times.items() if other != OURS)
        result["ratio"] = round(fastest / times[OURS]["ms"], 4)
    return result


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
