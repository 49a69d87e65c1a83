"""The pairformer of AlphaFold 3, with flash_ext's triangle attention and with SDPA.

    python examples/pairformer.py                    # on the GPU if there is one, else on the CPU
    python examples/pairformer.py --tokens 512 --blocks 4

Algorithm 17 of Abramson et al. 2024, without dropout: pairs of tokens z (N, N, Cz) are updated
along the edges of triangles, tokens s (N, Cs) by attention with a bias from the pairs. Triangle
attention has N rows of N keys and one bias (H, N, N) for all rows, and training needs its gradient.
The results and gradients of both must agree.

How to use flash_ext in such a model: see ``BiasedAttention.forward``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import flash_ext
except ModuleNotFoundError:  # not installed: use the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import flash_ext

# q, k, v (B, rows, H, N, D) and a bias (B, 1, H, N, N), with the names of cuEquivariance.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same function by torch."""
    return F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=bias[0])[None]


def transition(width: int) -> nn.Module:
    """The feed-forward layer."""
    inner = 4 * width
    layers = nn.LayerNorm(width), nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width)
    return nn.Sequential(*layers)


class TriangleMultiplication(nn.Module):
    """Each pair from the outgoing edges of its two tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_product = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        a, b = F.glu(self.inner(z)).permute(2, 0, 1).chunk(2)
        product = self.norm_product((a @ b.mT).permute(1, 2, 0))
        return self.gate(z).sigmoid() * self.out(product)


class BiasedAttention(nn.Module):
    """Attention along the rows of x (rows, N, C), with one bias from the pairs for all of them."""

    def __init__(self, width: int, pair: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.bias = nn.Sequential(nn.LayerNorm(pair), nn.Linear(pair, heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        *qkv, gate = self.inner(self.norm(x)).chunk(4, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2)[None] for y in qkv)
        bias = self.bias(z).permute(2, 0, 1).contiguous()[None, None]
        out = self.attend(q, k, v, bias)[0]  # flash_ext.triangle_attention
        return self.out(gate.sigmoid() * out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, pair: int, single: int, heads: tuple[int, int], attend: Attend) -> None:
        super().__init__()
        self.products = nn.ModuleList(TriangleMultiplication(pair) for _ in range(2))
        self.triangles = nn.ModuleList(
            BiasedAttention(pair, pair, heads[0], attend) for _ in range(2)
        )
        self.attention = BiasedAttention(single, pair, heads[1], attend)
        self.pair_transition, self.single_transition = transition(pair), transition(single)

    def forward(self, z: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        for module in self.products:  # outgoing edges, then incoming ones
            z = (z + module(z)).transpose(0, 1)
        for module in self.triangles:  # around the starting token, then the ending one
            z = (z + module(z, z)).transpose(0, 1)
        z = z + self.pair_transition(z)
        s = s + self.attention(s[None], z)[0]
        return z, s + self.single_transition(s)


class Pairformer(nn.Module):
    """heads: of triangle attention and of attention between tokens."""

    def __init__(
        self, attend: Attend, blocks: int = 2, pair: int = 128, single: int = 384,
        heads: tuple[int, int] = (4, 16),
    ) -> None:  # fmt: skip
        super().__init__()
        self.sizes = pair, single
        self.blocks = nn.ModuleList(Block(pair, single, heads, attend) for _ in range(blocks))

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Random pairs and tokens."""
        pair, single = self.sizes
        return torch.randn(tokens, tokens, pair), torch.randn(tokens, single)

    def forward(self, z: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            z, s = block(z, s)
        return z, s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--tokens", type=int, default=384 if device == "cuda" else 48)
    parser.add_argument("--blocks", type=int, default=2)
    args = parser.parse_args()
    found = {}
    for name, attend in (("flash_ext", flash_ext.triangle_attention), ("SDPA", sdpa)):
        torch.manual_seed(0)
        model = Pairformer(attend, args.blocks)
        inputs = [x.to(device, torch.bfloat16) for x in model.inputs(args.tokens)]
        loss = sum(x.float().square().mean() for x in model.to(device, torch.bfloat16)(*inputs))
        loss.backward()
        grads = torch.cat([x.grad.float().flatten() for x in model.parameters()])
        found[name] = torch.cat([loss.detach()[None], grads])
        print(f"{name}: loss {loss.item():.4f}, norm of all gradients {grads.norm():.4f}")
    ours, theirs = found.values()
    error = ((ours - theirs).norm() / theirs.norm()).item()
    print(f"relative difference {error:.1e}" + (": TOO LARGE" if error > 0.05 else ""))
    return int(error > 0.05)


if __name__ == "__main__":
    sys.exit(main())
