"""Masks that are no bands, beside FlexAttention, SDPA with the bool mask, and no mask at all.

    python benchmarks/masks.py                 # every mask of shapes.toml
    python benchmarks/masks.py --device cpu    # a smoke test

For each mask the calls take turns, forward and forward with backward: flash_ext with the Mask (bool
masks as its bias); its plain call, of which the mask's time should be the share of blocks; compiled
FlexAttention with its own BlockMask; SDPA's backends with the bool mask and K and V repeated for
each query head. Then the time to make the mask. No call is timed before it agrees with the first.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
from cells import SHAPES
from common import Json
from options import CPU, MIX
from providers import attempt, check
from timing import Timer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flash_ext
from flash_ext import Mask

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, S, H, D) each
PLAIN = "no mask"
BOOL = ("key padding", "random")  # given as bool tensors


def cases(device: torch.device) -> list[Json]:
    """The shapes; on a CPU small ones."""
    found = [{"batch": 1} | SHAPES["masks"]["all"] | x for x in SHAPES["masks"]["shapes"]]
    if device.type == "cpu":
        small = {"seqlen": 256, "heads": 4, "kv_heads": 2, "n": 40, "window": 60}
        found = [x | {name: n for name, n in small.items() if name in x} for x in found]
    return found


def masks_of(case: Json, device: torch.device) -> tuple[Callable[[], Mask], Mod]:
    """What makes the mask, and the same as FlexAttention's mask_mod."""
    name, seqlen, n = case["name"], case["seqlen"], case.get("n", 0)
    blocks = -(-seqlen // 128)
    if name == "prefix":
        return lambda: Mask.prefix(n, seqlen, device=device), lambda b, h, i, j: (j <= i) | (j < n)
    if name == "sinks":
        width = case["window"]
        make = lambda: Mask.sinks(n, (width - 1, 0), seqlen, device=device)  # noqa: E731
        return make, lambda b, h, i, j: (j <= i) & ((i - j < width) | (j < n))
    if name == "blocks":
        count = max(1, int(case["share"] * blocks))
        scores = torch.rand(1, case["heads"], blocks, blocks, device=device)
        index = scores.argsort(-1)[..., :count].contiguous()
        counts = torch.full(index.shape[:3], count, device=device)
        shown = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True)[0]
        make = lambda: Mask.blocks(index, counts, seqlen, seqlen)  # noqa: E731
        return make, lambda b, h, i, j: shown[h, i // 128, j // 128]
    if name in BOOL:
        shape = (case["batch"], 1, 1, seqlen) if name == "key padding" else (1, 1, seqlen, seqlen)
        if name == "random":
            visible = torch.rand(shape, device=device) < case["share"]
            return lambda: Mask.dense(visible), lambda b, h, i, j: visible[0, 0, i, j]
        lengths = torch.linspace(0.4, 1, case["batch"], device=device).mul(seqlen).long()
        visible = torch.arange(seqlen, device=device) < lengths.view(-1, 1, 1, 1)
        make = lambda: Mask.dense(visible, seqlen_q=seqlen)  # noqa: E731
        return make, lambda b, h, i, j: j < lengths[b]
    mix, causal = (MIX if device.type == "cuda" else CPU.mix), "causal" in name
    ends = [min(x, seqlen) for x in itertools.accumulate(mix, initial=0)]
    offsets = torch.tensor([*ends[:-1], seqlen], dtype=torch.int32, device=device)
    ids = torch.searchsorted(offsets, torch.arange(seqlen, device=device), right=True)
    make = lambda: Mask.documents(cu_seqlens=offsets, seqlen=seqlen, causal=causal)  # noqa: E731
    return make, lambda b, h, i, j: (ids[i] == ids[j]) & ((i >= j) if causal else (i >= 0))


def flex_mask(case: Json, mask: Mask, mod: Mod) -> BlockMask:
    """FlexAttention's; of blocks from lists, since mask_mod of all heads takes too much memory."""
    if case["name"] != "blocks":
        batch, heads = (x if x > 1 else None for x in mask.shape[:2])
        return create_block_mask(mod, batch, heads, *mask.shape[2:], device=mask.device)
    full = mask.kinds() == 1
    counts, index = full.sum(-1).int(), (~full).int().argsort(stable=True).int()
    return BlockMask.from_kv_blocks(torch.zeros_like(counts), index, counts, index, mask_mod=mod)


def providers(case: Json, mask: Mask, mod: Mod, device: torch.device) -> dict[str, Attend]:
    """The calls, ours first."""
    visible, group = mask.to_dense(), case["heads"] // case["kv_heads"]
    given: Any = {"bias": visible} if case["name"] in BOOL else {"mask": mask}
    block_mask = flex_mask(case, mask, mod)
    flex = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def of_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    def of_sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if group > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        with sdpa_kernel(backend):
            call = torch.nn.functional.scaled_dot_product_attention
            return call(q, k, v, attn_mask=visible).transpose(1, 2)

    peers = {"flex": of_flex}
    if device.type == "cuda":
        names = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        peers |= {name: functools.partial(of_sdpa, x) for name, x in names.items()}
    return {
        "flash_ext": functools.partial(flash_ext.attention, **given),
        PLAIN: flash_ext.attention,
    } | peers


def times(case: Json, device: torch.device, rounds: int) -> Json:
    """Of every call in both directions, and of making the mask."""
    make, mod = masks_of(case, device)
    mask, timer, results = make(), Timer(device), {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = case["heads"], case["kv_heads"], case["kv_heads"]
    shapes = [(case["batch"], case["seqlen"], n, case["d"]) for n in heads]
    q, k, v = (torch.randn(x, dtype=dtype, device=device) for x in shapes)
    leaves, dout = [x.clone().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    group = heads[0] // heads[1]
    few = q[:, :, :group].float(), k[:, :, :1].float(), v[:, :, :1].float()
    shown = mask.to_dense()[:, :group]
    want, _ = flash_ext.reference.attention(*(x[:1] for x in few), bias=shown[:1])
    for direction in ("forward", "both"):
        ready = {}
        for name, attend in providers(case, mask, mod, device).items():

            def run(attend: Attend = attend, direction: str = direction) -> tuple[Tensor, ...]:
                if direction == "forward":
                    with torch.no_grad():
                        return (attend(q, k, v),)
                return torch.autograd.grad(attend(*leaves), leaves, dout)

            def prepare(
                run: Callable[[], Any] = run, exact: bool = direction == "forward" and name != PLAIN
            ) -> Callable[[], Any]:
                found = run()
                if exact:
                    check([(found[0][:1, :, :group], want)])
                return run

            call, reason = attempt(prepare)
            if call is None:
                results[f"{name} {direction}"] = reason
            else:
                ready[f"{name} {direction}"] = call
        results |= timer.timed(ready, 0, rounds)
    results |= timer.timed({"make": make}, 0, rounds)
    return {"results": results, "density": round(float(mask.density()), 5)}


def main() -> int:
    """Run; the exit status is 1 if a call of flash_ext was wrong or failed."""
    parser = common.parser(__doc__)
    common.add_device(parser)
    parser.add_argument("--only", nargs="*", help="the names of masks")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each kind")
    args = parser.parse_args()
    recorder = common.begin("masks", args)
    chosen = [x for x in cases(recorder.device) if not args.only or x["name"] in args.only]
    bad = False
    for case in common.progress(chosen, len(chosen), "masks"):
        found = times(case, recorder.device, args.rounds)
        recorder.add(case, found)
        ours = [x for name, x in found["results"].items() if name.startswith(("flash_ext", PLAIN))]
        bad |= any("ms" not in x for x in ours)
        torch.compiler.reset()
        common.free_memory(recorder.device)
    recorder.close()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
