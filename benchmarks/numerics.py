"""Errors of attention against float64: variants and peers, by type, S, mask and distribution.

    python benchmarks/numerics.py                       # under a minute on an H200
    python benchmarks/numerics.py --s 512 --dtypes bf16
    python benchmarks/numerics.py --device cpu          # the CPU kernels, float32, short sequences

A tensor's error is its difference from float64 standard attention on the same rounded inputs, over
the root mean square of the exact tensor: the largest ('max') and the root mean square ('rms'), and
'finite', the share of its entries that are finite numbers, where that is not all of them.

"standard" is standard attention in the inputs' type, S and P rounded to it. "naive" computes
softmax as exp(S) / sum(exp(S)), in float32 throughout, so that it fails for one reason only: it
subtracts no maximum. The second table has only the softmax, in float32, over rows of logits of
growing size: naive, safe (three passes) and online (one pass over blocks, as in FlashAttention).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from functools import partial

import common
import torch
from cells import DTYPES
from common import Json
from distributions import DISTRIBUTIONS
from providers import Provider, Workload, attempt, collect, command_line, running
from torch import Tensor

import flash_ext.reference

TENSORS = ("out", "dq", "dk", "dv")
SEQLENS, CPU_SEQLENS = (512, 2048, 8192), (128, 256)
PEERS_ASKED = ("flash", "cudnn", "efficient", "flash_attn_4")
SOFTMAX_SCALES = (1.0, 10.0, 30.0, 100.0, 1000.0)
SOFTMAX_ROWS, SOFTMAX_KEYS, SOFTMAX_BLOCK = 256, 4096, 64
# A variant is too wrong beyond this many times standard attention's RMS error, and beyond the noise
# of float32 sums (delta = rowsum(dO * O) cancels where P is nearly one-hot).
FACTOR, FLOOR = 2.0, 1e-5


def standard() -> Provider:
    """The reference of the tests, in the inputs' type."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_ext.reference.attention(q, k, v, causal=causal)[0]

    return Provider("standard", attend)


def naive() -> Provider:
    """Softmax without the maximum, everything in float32."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        scale = q.shape[-1] ** -0.5
        Q, K, V = (x.float().transpose(1, 2) for x in (q, k, v))
        P = naive_softmax(Q @ K.mT * scale, causal)
        return (P @ V).transpose(1, 2).to(q.dtype)

    return Provider("naive", attend)


def naive_softmax(x: Tensor, causal: bool = False) -> Tensor:
    """exp(x) / sum(exp(x)) over the last dimension."""
    f = x.exp()
    f = f.tril() if causal else f
    return f / f.sum(dim=-1, keepdim=True)


def workload(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, distribution: str
) -> Workload:
    """Inputs (B, S, H, D) of a distribution, drawn in float32 and rounded to ``dtype``."""
    work = Workload(shape, torch.float32, device)
    inputs = {"q": work.q, "k": work.k, "v": work.v}
    DISTRIBUTIONS[distribution](inputs)
    work.q, work.k, work.v, work.dout = (x.to(dtype) for x in (work.q, work.k, work.v, work.dout))
    return work


def exact(work: Workload, causal: bool) -> list[Tensor]:
    """out, dq, dk, dv in float64, one head at a time: S x S doubles are many."""
    found: list[list[Tensor]] = [[] for _ in TENSORS]
    for head in range(work.q.shape[2]):
        one = slice(head, head + 1)
        q, k, v = (x[:, :, one].double().requires_grad_() for x in (work.q, work.k, work.v))
        out = flash_ext.reference.attention(q, k, v, causal=causal)[0]
        grads = torch.autograd.grad(out, (q, k, v), work.dout[:, :, one].double())
        for results, x in zip(found, (out.detach(), *grads), strict=True):
            results.append(x)
    return [torch.cat(results, dim=2) for results in found]


def error(got: Tensor, want: Tensor) -> dict[str, float]:
    """max and rms of the finite differences over the RMS of ``want``; the finite share if not 1."""
    difference = got.double() - want
    finite = difference.isfinite()
    share = finite.double().mean().item()
    if share == 0:
        return {"finite": 0.0}
    size = want.square().mean().sqrt()
    wrong = difference[finite] / size
    result = {"max": wrong.abs().max().item(), "rms": wrong.square().mean().sqrt().item()}
    result = {name: float(f"{value:.4g}") for name, value in result.items()}
    return result if share == 1 else result | {"finite": round(share, 6)}


def cell(work: Workload, providers: list[Provider], causal: bool) -> Json:
    """The errors of every provider's out and gradients, or why there are none."""
    wanted = exact(work, causal)

    def errors(provider: Provider) -> Json:
        out = work.forward(provider, causal)()
        with provider.around():
            grads = [provider.view(x) for x in work.step(provider, causal)()]
        found = zip(TENSORS, (out, *grads), wanted, strict=True)
        return {name: error(x, want) for name, x, want in found}

    results = {provider.name: attempt(partial(errors, provider)) for provider in providers}
    return {name: found or reason for name, (found, reason) in results.items()}


def softmax(scale: float, device: torch.device) -> Json:
    """Errors of three forms of softmax in float32 over logits N(0, scale²)."""
    generator = torch.Generator(device).manual_seed(0)
    shape = SOFTMAX_ROWS, SOFTMAX_KEYS
    logits = scale * torch.randn(shape, device=device, generator=generator)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "naive": naive_softmax,
        "safe": flash_ext.reference.safe_softmax,
        "online": lambda x: flash_ext.reference.online_softmax(x, SOFTMAX_BLOCK),
    }
    exact = logits.double().softmax(-1)
    errors = {name: error(form(logits), exact) for name, form in forms.items()}
    return {"largest": round(logits.max().item(), 1), "forms": errors}


def too_wrong(cells: list[Json], names: list[str]) -> list[str]:
    """Where a variant's results are not finite, or further off than FACTOR times standard's."""
    found = []
    for c in cells:
        ran = [name for name in names if "refused" not in c["providers"][name]]
        for name, tensor in itertools.product(ran, TENSORS):
            mine, reference = (c["providers"][n].get(tensor, {}) for n in (name, "standard"))
            limit = max(FLOOR, FACTOR * reference.get("rms", 0))
            if "finite" in mine or not mine.get("rms", math.inf) <= limit:
                found.append(f"{name} {tensor}, {place(c)}: {mine}, standard {reference}")
    return found


def place(c: Json) -> str:
    """A cell in words."""
    return f"{c['dtype']} S {c['seqlen']} {'causal' if c['causal'] else 'full'} {c['distribution']}"


def main() -> int:
    """Run; the exit status is 1 if a variant was too wrong somewhere."""
    parser = command_line(__doc__, PEERS_ASKED)
    add = parser.add_argument
    add("--dtypes", nargs="*", choices=list(DTYPES), help="default: fp16 and bf16; CPU: fp32")
    add("--s", nargs="*", type=int, help=f"sequence lengths, default {SEQLENS}")
    add("--d", type=int, default=128, help="head dim")
    add("--heads", type=int, default=4)
    args = parser.parse_args()
    recorder = common.begin("numerics", args)
    device = recorder.device
    cpu = device.type == "cpu"
    variants = args.variants or running(device)
    providers, missing = collect(variants, [] if cpu else args.peers)
    providers += [standard(), naive()]
    grid = list(
        itertools.product(
            args.dtypes or (["fp32"] if cpu else ["fp16", "bf16"]),
            args.s or (CPU_SEQLENS if cpu else SEQLENS),
            (False, True),
            DISTRIBUTIONS,
        )
    )
    cells = []
    for dtype, seqlen, causal, distribution in common.progress(grid, len(grid), "cells"):
        work = workload((1, seqlen, args.heads, args.d), DTYPES[dtype], device, distribution)
        shape = {"dtype": dtype, "seqlen": seqlen, "causal": causal, "distribution": distribution,
                 "d": args.d, "heads": args.heads}  # fmt: skip
        found = {"providers": cell(work, providers, causal)}
        recorder.add(shape, found)
        cells.append(shape | found)
    for scale in SOFTMAX_SCALES:
        recorder.add({"softmax": True, "scale": scale}, softmax(scale, device))
    recorder.close(missing)
    wrong = too_wrong(cells, variants)
    for line in wrong:
        print(f"TOO WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
