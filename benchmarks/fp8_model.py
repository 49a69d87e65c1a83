"""A small GPT, trained in bfloat16 and evaluated in bfloat16 and in FP8.

    python benchmarks/fp8_model.py                 # over a minute on an H200
    python benchmarks/fp8_model.py --device cpu    # a smoke test

The byte-level GPT of examples/train_gpt.py, trained with flash_ext's bfloat16 attention on the
first part of the text. Then its loss, in nats a byte, on the rest, which training did not see: the
same weights and the same bytes, under bfloat16 autocast, where only attention differs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial

import common
import torch
from common import Json
from fp8_providers import METHODS, PER_TENSOR
from providers import attempt
from torch import Tensor
from torch.nn import functional as F

from flash_ext import fp8

sys.path.append(str(common.ROOT / "examples"))
import train_gpt  # noqa: E402

BFLOAT16, SDPA, FP8 = "flash_ext, bfloat16", "SDPA, bfloat16", "flash_ext.fp8.attention"
QK_IN_FP8 = "the same, q and k in FP8"
OURS = (BFLOAT16, FP8, QK_IN_FP8)
HELD_OUT = 0.05  # of the text
CHECKED = 128  # chunks of the held out text

Config = train_gpt.Config
GPU = tuple(
    Config(8, heads, 768, 2048, 8, steps=1300, device="cuda", megabytes=8, rate=6e-4)
    for heads in (12, 6)
)
CPU = (Config(2, 2, 32, 64, 4, steps=20, device="cpu", megabytes=0.2),)  # a smoke test


def per_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FP8 as simple as it can be."""
    return METHODS[PER_TENSOR](q, k, v).attend(causal=True, out_dtype=q.dtype)


ATTENTIONS: dict[str, train_gpt.Attention] = {
    BFLOAT16: train_gpt.flash_attention("auto"),
    SDPA: train_gpt.sdpa,
    FP8: lambda q, k, v: fp8.attention(q, k, v, causal=True),
    QK_IN_FP8: lambda q, k, v: fp8.attention(q, k, v, causal=True, qk_dtype=torch.float8_e4m3fn),
    f"FP8, {PER_TENSOR}": per_tensor,
}


def held_out(text: Tensor, config: Config) -> Iterator[Tensor]:
    """Batches of chunks (B, S + 1), one after the other."""
    chunks = text[: len(text) // (config.seq + 1) * (config.seq + 1)].view(-1, config.seq + 1)
    for batch in chunks[:CHECKED].split(config.batch):
        yield batch.to(config.device)


@torch.no_grad()
def evaluate(
    model: train_gpt.GPT, attention: train_gpt.Attention, chunks: list[Tensor], config: Config
) -> float:
    """The mean loss with this attention."""
    for block in model.blocks:
        block.attention = attention
    losses = []
    for chunk in chunks:
        with torch.autocast(config.device, torch.bfloat16):
            logits = model(chunk[:, :-1])
        losses.append(F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten()))
    return float(torch.stack(losses).double().mean())


def measure(config: Config) -> tuple[Json, Json]:
    """Train, then evaluate with every attention: the cell and its result."""
    text = train_gpt.standard_library(config.megabytes)
    seen = int(len(text) * (1 - HELD_OUT))
    with torch.device(config.device):  # the weights are drawn there
        training = train_gpt.Training(ATTENTIONS[BFLOAT16], config)
    batches = train_gpt.batches(text[:seen], config)
    for chunk in itertools.islice(batches, config.steps):
        training.step(chunk)
    chunks = list(held_out(text[seen:], config))
    found: dict[str, Json] = {}
    for name, attention in ATTENTIONS.items():
        loss, reason = attempt(partial(evaluate, training.model, attention, chunks, config))
        found[name] = reason or {"loss": loss}
    base = found[BFLOAT16].get("loss")
    for result in found.values():
        if base and "loss" in result:
            result["difference"] = float(f"{result['loss'] / base - 1:.4g}")
            result["loss"] = round(result["loss"], 6)
    cell = {
        "d": config.width // config.heads, "layers": config.layers, "heads": config.heads,
        "width": config.width, "seqlen": config.seq, "batch": config.batch, "steps": config.steps,
    }  # fmt: skip
    return cell, {"attentions": found}


def main() -> int:
    """Run; the exit status is 1 if an attention of flash_ext failed."""
    parser = common.parser(__doc__)
    common.add_device(parser)
    args = parser.parse_args()
    recorder = common.begin("fp8_model", args)
    failed = False
    for config in GPU if recorder.device.type == "cuda" else CPU:
        line = recorder.add(*measure(config))
        failed |= any("skipped" in line["result"]["attentions"][name] for name in OURS)
    recorder.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
