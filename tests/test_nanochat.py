"""A language model that calls FlashAttention-3 as nanochat does: training, then generation.

Would catch a call of nanochat's that the drop-in does not take, windows that reach too far or not
far enough, a cache whose new keys are misplaced, and a loss that torch.compile changes.

nanochat asks the package `kernels` for FlashAttention-3, and takes `flash_attn_interface` from what
it gets. Here that is flash_ext's, as docs/integrations.md has it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
Window = tuple[int, int]

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 4, 4, 2, 16, 50
SEQUENCE = 192
WINDOWS: list[Window] = [(64, 0), (128, 0), (64, 0), (SEQUENCE, 0)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_ext

    found = SimpleNamespace(get_kernel=lambda name: flash_ext, has_kernel=lambda name: True)
    monkeypatch.setitem(sys.modules, "kernels", found)


def flash_attention_3() -> Any:
    from kernels import get_kernel

    return get_kernel("varunneal/flash-attention-3").flash_attn_interface


class Standard:
    """The same two functions by SDPA, with masks."""

    @staticmethod
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: Window) -> Any:
        assert causal and window_size[1] == 0
        rows = torch.arange(k.shape[1], device=q.device)
        distance = rows[-q.shape[1] :, None] - rows
        mask = (distance >= 0) & (distance <= window_size[0])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    @classmethod
    def flash_attn_with_kvcache(
        cls, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor,
        cache_seqlens: Tensor, causal: bool, window_size: Window,
    ) -> Any:  # fmt: skip
        first = int(cache_seqlens[0])
        end = first + k.shape[1]
        k_cache[:, first:end], v_cache[:, first:end] = k, v
        return cls.flash_attn_func(q, k_cache[:, :end], v_cache[:, :end], causal, window_size)


class Cache:
    def __init__(self, batch: int, rows: int, like: Tensor) -> None:
        shape = (LAYERS, batch, rows, KV_HEADS, DIM)
        self.k, self.v = (torch.zeros(shape, device=like.device, dtype=like.dtype) for _ in "kv")
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=like.device)

    def fill(self, other: Cache) -> None:
        """From one of a single sequence."""
        rows = int(other.seqlens[0])
        self.k[:, :, :rows], self.v[:, :, :rows] = other.k[:, :, :rows], other.v[:, :, :rows]
        self.seqlens.fill_(rows)


def rotated(x: Tensor, first: int) -> Tensor:
    """RMS-normed after rotary embeddings of the positions from first on."""
    positions = torch.arange(first, first + x.shape[1], device=x.device, dtype=torch.float32)
    angles = positions[:, None] / 100 ** (torch.arange(DIM // 2, device=x.device) / (DIM // 2))
    cos, sin = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    x = torch.cat((a * cos + b * sin, b * cos - a * sin), -1)
    return 1.2 * F.rms_norm(x, (DIM,))


class Layer(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        width = HEADS * DIM
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, KV_HEADS * DIM), nn.Linear(width, KV_HEADS * DIM)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(
        self, x: Tensor, window: Window, first: int, cache: Cache | None, index: int
    ) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:])
        q, k, v = (f(normed).unflatten(-1, (-1, DIM)) for f in (self.q, self.k, self.v))
        q, k = rotated(q, first), rotated(k, first)
        if cache is None:
            y = self.attention.flash_attn_func(q, k, v, causal=True, window_size=window)
        else:
            y = self.attention.flash_attn_with_kvcache(
                q,
                cache.k[index],
                cache.v[index],
                k=k,
                v=v,
                cache_seqlens=cache.seqlens,
                causal=True,
                window_size=window,
            )
        x = x + self.out(y.contiguous().flatten(2))
        return x + self.mlp(F.rms_norm(x, x.shape[-1:]))


class Model(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.layers = nn.ModuleList(Layer(attention) for _ in WINDOWS)
        self.head = nn.Linear(HEADS * DIM, VOCABULARY)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embedding(tokens)
        first = 0 if cache is None else int(cache.seqlens[0])
        for i, (layer, window) in enumerate(zip(self.layers, WINDOWS, strict=True)):
            x = layer(x, window, first, cache, i)
        if cache is not None:
            cache.seqlens += tokens.shape[1]
        return self.head(x).float()


def models(device: str) -> tuple[Model, Model]:
    """On flash_ext and on SDPA, of the same weights, in a type that the device has kernels for."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    made = [Model(attention).to(device, dtype) for attention in (flash_attention_3(), Standard)]
    return made[0], made[1]


def tokens(batch: int, rows: int, device: str) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (batch, rows), device=device)


def tolerance(device: str) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 5e-2, "atol": 5e-2}


def train(model: Model, run: Any, text: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(run(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {n: x.grad.clone() for n, x in model.named_parameters()}
        optimizer.step()
    return losses, gradients


@pytest.mark.share(1 / 2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", (False, True))
def test_training(compiled: bool, device: str) -> None:
    model, standard = models(device)
    run: Any = model
    if compiled:
        run = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    text = tokens(2, SEQUENCE + 1, device)
    losses, gradients = train(model, run, text)
    wanted, wanted_gradients = train(standard, standard, text)
    assert losses == pytest.approx(wanted, rel=1e-3 if device == "cpu" else 2e-2)
    assert losses[-1] < losses[0]
    for name, x in gradients.items():
        torch.testing.assert_close(x, wanted_gradients[name], **tolerance(device))


@torch.inference_mode()
def test_generation(device: str) -> None:
    """A prompt, whose cache several samples continue, token by token and by some at a time."""
    logits = {}
    for name, model in zip(("flash_ext", "standard"), models(device), strict=True):
        prompt, like = tokens(1, 100, device), model.embedding.weight
        cache = Cache(1, 100, like)
        found = [model(prompt, cache)]
        samples = Cache(3, 100 + 80, like)
        samples.fill(cache)
        more = tokens(3, 80, device)
        for part in more.split((1, 1, 1, 7, 30, 1, 39), 1):
            found.append(model(part, samples))
        assert samples.seqlens.tolist() == [180] * 3
        logits[name] = torch.cat([x.flatten(0, 1) for x in found])
        if name == "flash_ext" and device == "cpu":
            whole = model(torch.cat((prompt.expand(3, -1), more), 1))
            torch.testing.assert_close(found[-1], whole[:, -39:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits["flash_ext"], logits["standard"], **tolerance(device))
