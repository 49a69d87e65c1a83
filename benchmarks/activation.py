"""Models that do not know flash_ext, trained with and without `sdpa.activate()`.

What train.py --activation measures: whole eager steps (forward, backward, AdamW) of small models,
in which the GPU often waits for the CPU. Their attention is F.scaled_dot_product_attention.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext

import common
import torch
import torch.nn.functional as F
from common import Json
from timing import step_times
from torch import Tensor, nn

from flash_ext.integrations import sdpa

METHOD = (
    "One process and one model; SDPA by itself and under flash_ext's activation take turns, round "
    "by round. A turn is two steps that are not timed, then the timed steps, one right after the "
    "other, between CUDA events. A step is forward, backward and AdamW, eager, under bf16 "
    "autocast. 'ms' is the median step, 'ratio' the median over the rounds of SDPA's mean step "
    "over the activated one: above 1, activation is faster. 'difference' is the relative error of "
    "all gradients together, of the two on the same weights."
)
ROUNDS, STEPS, SKIPPED = 20, 10, 2
LIMIT = 2e-2  # of 'difference'; the two round to bf16 at different points


class Attention(nn.Module):
    """Heads side by side in one projection, as in timm's and nanoGPT's models."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) to the same."""
        batch, rows, width = x.shape
        qkv = self.qkv(x).reshape(batch, rows, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).reshape(batch, rows, width))


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) to the same."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer with a class token, as in Dosovitskiy et al. (2021)."""

    def __init__(self, layers: int, width: int, heads: int, image: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // 16) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, image, image) to (B, 1000)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT(nn.Module):
    """A decoder over bytes, without dropout."""

    def __init__(self, layers: int, width: int, heads: int, rows: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(rows, width)
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S) to (B, 256, S)."""
        places = torch.arange(x.shape[1], device=x.device)
        x = self.bytes(x) + self.positions(places)
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


Case = tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]  # the model, its input, its loss


def vit_b(batch: int) -> Case:
    """ViT-B/16 on images of 224 x 224: 197 tokens, 12 heads of 64."""
    labels = torch.randint(1000, (batch,))
    return ViT(12, 768, 12), torch.randn(batch, 3, 224, 224), lambda y: F.cross_entropy(y, labels)


def encoder(batch: int) -> Case:
    """torch's own nn.TransformerEncoder, 6 layers, 8 heads of 64, 256 tokens."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, torch.randn(batch, 256, 512), lambda y: y.square().mean()


def gpt_6(batch: int) -> Case:
    """Six causal layers, 6 heads of 64, 256 tokens."""
    x = torch.randint(256, (batch, 256))
    return GPT(6, 384, 6, 256), x, lambda y: F.cross_entropy(y, x)


CASES = {"ViT-B/16": vit_b, "nn.TransformerEncoder": encoder, "GPT, 6 layers": gpt_6}
BATCH = 8


class Steps:
    """One model's training steps."""

    def __init__(self, make: Callable[[int], Case], device: torch.device) -> None:
        self.device = device
        with device:
            self.model, self.input, self.criterion = make(BATCH if device.type == "cuda" else 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def loss(self) -> Tensor:
        """The forward pass."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.criterion(self.model(self.input))

    def step(self) -> None:
        """Forward, backward and the optimizer."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> Tensor:
        """Of all weights, in order."""
        self.loss().backward()
        found = torch.cat([x.grad.flatten() for x in self.model.parameters()])
        self.optimizer.zero_grad()
        return found

    def turn(self, steps: int) -> list[float]:
        """The milliseconds of each of ``steps`` steps, after some that are not timed."""
        for _ in range(SKIPPED):
            self.step()
        return [seconds * 1e3 for seconds in step_times(self.step, steps, self.device)]


def measure(make: Callable[[int], Case], device: torch.device, rounds: int, steps: int) -> Json:
    """One model's steps, ``METHOD``."""
    torch.manual_seed(0)
    training = Steps(make, device)
    around = {"sdpa": nullcontext, "activated": sdpa.activated}
    times: dict[str, list[list[float]]] = {name: [] for name in around}
    try:
        gradients = []
        for context in around.values():
            with context():
                gradients.append(training.gradients())
        difference = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
        del gradients
        for turn in range(rounds + 1):
            for name in list(around)[:: 1 if turn % 2 else -1]:
                with around[name]():
                    times[name].append(training.turn(steps))
    except Exception as error:
        return {"skipped": common.first_line(error)}
    result: Json = {"difference": float(f"{difference:.3g}")}
    if not difference <= LIMIT:
        return result | {"skipped": f"WRONG RESULT: off by {difference:.2g}", "wrong": True}
    times = {name: turns[1:] for name, turns in times.items()}  # the first warms up
    for name, turns in times.items():
        q1, median, q3 = statistics.quantiles(sum(turns, []) * 2, n=4, method="inclusive")
        result[name] = {"ms": round(median, 4), "q1_ms": round(q1, 4), "q3_ms": round(q3, 4)}
    pairs = zip(times["sdpa"], times["activated"], strict=True)
    ratios = [statistics.mean(a) / statistics.mean(b) for a, b in pairs]
    return result | {"ratio": round(statistics.median(ratios), 4), "date": common.now()}


def print_results(results: Json) -> None:
    """One line per model."""
    print(f"\nwhole steps, batch {BATCH}: SDPA by itself and activated")
    for name, r in results.items():
        if "skipped" in r:
            print(f"  {name:<24} {r['skipped']}")
            continue
        before, after = (f"{r[x]['ms']:9.3f} ms" for x in ("sdpa", "activated"))
        print(f"  {name:<24}{before}{after}  {r['ratio']:.3f} times as fast")
    ratios = [r["ratio"] for r in results.values() if "ratio" in r]
    if ratios:
        print(f"  geometric mean {math.exp(statistics.mean(map(math.log, ratios))):.3f}")
