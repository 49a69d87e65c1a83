"""Generate text for a queue of prompts: continuous batching over pages, with a shared prefix.

    python examples/generate.py                      # on the GPU if there is one, else on the CPU
    python examples/generate.py --prompts 64 --tokens 200 --page-size 16

A byte-level transformer with random weights serves prompts that begin with the same instructions.
The keys of these are computed and held once. Each step is one call per layer for whole prompts of
new requests and one token of each that runs: ``Server.attend``. A finished request gives its pages
to the next one. Some prompts are generated again without a cache, by SDPA over the whole text for
each token: the greedy tokens must be the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see train_gpt.py

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import flash_ext
except ModuleNotFoundError:  # not installed: use the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import flash_ext
from flash_ext.timing import progress

INSTRUCTIONS = "Answer in one sentence. Be exact, be kind, and do not repeat the question. " * 4
# (layer, q, k, v) to out, all (tokens, heads, D); q and k are not rotated yet.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# ----------------------------------------------------------------------------------------- model
class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.dim, self.heads = width // heads, (heads, kv_heads, kv_heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * self.dim, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """x: (tokens, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.dim)).split(self.heads, dim=1)
        x = x + self.proj(attend(layer, q, k, v).flatten(1))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Bytes (tokens) to logits (tokens, 256)."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return self.head(self.norm(x))


def angles(positions: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary positions, (positions, dim / 2) each."""
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2, device=device) / dim)
    turns = torch.arange(positions, device=device)[:, None] * frequencies
    return turns.cos(), turns.sin()


# ---------------------------------------------------------------------------------------- server
@dataclass
class Request:
    """A prompt, what was generated, and the pages that hold its keys."""

    prompt: list[int]
    wanted: int
    generated: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    held: int = 0  # keys in the cache

    def next_tokens(self) -> list[int]:
        """Those whose keys are not in the cache yet: the prompt, then the last token."""
        return self.generated[-1:] or self.prompt


class Server:
    """Runs requests as pages become free, all in one batch whose members change."""

    def __init__(self, model: Model, prefix: list[int], pages: int, page_size: int) -> None:
        weight, block = model.embed.weight, model.blocks[0]
        self.model, self.page_size, self.device = model, page_size, weight.device
        self.free = list(range(pages))
        shape = (block.heads[1], block.dim)
        like = {"dtype": weight.dtype, "device": weight.device}
        self.caches = torch.zeros(len(model.blocks), 2, pages, page_size, *shape, **like)
        self.prefix = torch.zeros(len(model.blocks), 2, 1, len(prefix), *shape, **like)
        longest = len(prefix) + pages * page_size
        self.rotary = dict(
            zip(("rotary_cos", "rotary_sin"), angles(longest, block.dim, self.device), strict=True)
        )
        model(torch.tensor(prefix, device=self.device), self.write_prefix)

    def write_prefix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the prefix to itself, which fills its cache."""
        return flash_ext.attention_with_cache(
            q[None], *self.prefix[layer], k=k[None], v=v[None], cache_seqlens=0, causal=True,
            **self.rotary,
        )[0]  # fmt: skip

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The keys of new tokens are rotated and written to their pages; then each token sees the
        prefix and the keys of its request up to its own."""
        return flash_ext.attention_with_shared_prefix(
            q, *self.prefix[layer, :, 0], *self.caches[layer], k=k, v=v, causal=True,
            cu_seqlens_q=self.starts, cu_seqlens_k_new=self.starts, cache_seqlens=self.held,
            page_table=self.table, **self.rotary,
        )  # fmt: skip

    def step(self, running: list[Request]) -> None:
        """One more token of each."""
        tokens = [request.next_tokens() for request in running]

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        lengths = [len(x) for x in tokens]
        self.starts = integers([0, *lengths]).cumsum(0, dtype=torch.int32)
        self.held = integers([request.held for request in running])
        columns = max(len(request.pages) for request in running)
        padded = [request.pages + [-1] * (columns - len(request.pages)) for request in running]
        self.table = integers(padded)  # type: ignore[arg-type]
        logits = self.model(integers(sum(tokens, [])), self.attend)
        best = logits[self.starts[1:] - 1].float().argmax(-1).tolist()
        for request, token, length in zip(running, best, lengths, strict=True):
            request.generated.append(token)
            request.held += length

    def run(self, requests: list[Request]) -> Iterator[Request]:
        """Yields each request when it is finished."""
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            while waiting:
                keys = len(waiting[0].prompt) + waiting[0].wanted
                needed = -(-keys // self.page_size)
                if needed > len(self.free):
                    break
                request = waiting.popleft()
                request.pages = [self.free.pop() for _ in range(needed)]
                running.append(request)
            if not running:
                raise ValueError("a request needs more pages than there are")
            self.step(running)
            for request in [x for x in running if len(x.generated) == x.wanted]:
                running.remove(request)
                self.free += request.pages
                yield request


# ------------------------------------------------------------------------------- without a cache
def without_cache(model: Model, text: list[int], wanted: int) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens after a text by SDPA, and their logits."""
    device, dim = model.embed.weight.device, model.blocks[0].dim
    cos, sin = angles(len(text) + wanted, dim, device)

    def rotated(x: Tensor) -> Tensor:
        low, high = x.float().chunk(2, -1)
        c, s = cos[: len(x), None], sin[: len(x), None]
        return torch.cat((low * c - high * s, low * s + high * c), -1).to(x.dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (rotated(q), rotated(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    tokens, logits = list(text), []
    for _ in range(wanted):
        logits.append(model(torch.tensor(tokens, device=device), attend)[-1].float())
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(text) :], logits


def is_same(found: list[int], wanted: list[int], logits: list[Tensor], tie: float) -> bool:
    """Whether the tokens are the same, up to one whose logits are equal but for rounding."""
    for a, b, x in zip(found, wanted, logits, strict=True):
        if a != b:
            return bool(x[b] - x[a] <= tie)
    return True


def parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu")
    add("--prompts", type=int, default=64 if cuda else 6)
    add("--tokens", type=int, default=128 if cuda else 12, help="to generate for each prompt")
    add("--layers", type=int, default=8 if cuda else 2)
    add("--width", type=int, default=1024 if cuda else 64)
    add("--page-size", type=int, default=16)
    add("--pages", type=int, default=512 if cuda else 12, help="fewer than all prompts need")
    add("--compare", type=int, default=4, help="prompts that are also generated without a cache")
    args = parser.parse_args()
    for name in ("prompts", "tokens", "layers", "page_size", "pages"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    if args.width % 64:
        parser.error(f"--width: must be a multiple of 64, got {args.width}")
    return args


@torch.no_grad()
def main() -> int:
    """The exit status is 1 if the tokens with and without a cache differ."""
    args = parse()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    heads = args.width // (64 if cuda else 16)
    dtype = torch.bfloat16 if cuda else torch.float32
    model = Model(args.layers, args.width, heads, max(1, heads // 4)).to(device, dtype)
    prefix = list(INSTRUCTIONS.encode())
    requests = [
        Request(list(f"Question {i}: {'what is ' * (i % 5)}{i * i}?".encode()), args.tokens)
        for i in range(args.prompts)
    ]
    server = Server(model, prefix, args.pages, args.page_size)
    started = time.perf_counter()
    for _ in progress(server.run(requests), len(requests), "prompts"):
        pass
    seconds = time.perf_counter() - started
    tokens = sum(len(request.generated) for request in requests)
    whole = sum(len(prefix) + len(request.prompt) + request.wanted for request in requests)
    held = (server.caches.nbytes + server.prefix.nbytes) / 2**20
    alone = server.prefix.nbytes / len(prefix) * whole / 2**20
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    print(f"keys and values: {held:.1f} MiB; without pages and a shared prefix {alone:.1f} MiB")
    if cuda:
        print(f"memory at most: {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB")

    compared = requests[: args.compare]
    started, same = time.perf_counter(), 0
    for request in progress(iter(compared), len(compared), "without a cache"):
        expected = without_cache(model, prefix + request.prompt, request.wanted)
        same += is_same(request.generated, *expected, tie=0.1 if cuda else 1e-3)
    seconds = time.perf_counter() - started
    if compared:
        rate = args.tokens * len(compared) / seconds
        print(f"SDPA without a cache: {rate:.0f} tokens/s; same tokens: {same} of {len(compared)}")
    return int(same < len(compared))


if __name__ == "__main__":
    sys.exit(main())
