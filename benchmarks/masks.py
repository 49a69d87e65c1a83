"""Masks that are no bands, beside FlexAttention, SDPA with the bool mask, and no mask at all.

    python benchmarks/masks.py                 # every mask of shapes.toml
    python benchmarks/masks.py --device cpu    # a smoke test

First the mask is made, and timed. Then calls take turns, forward and forward with backward:
flash_ext with the mask (a bool mask as its bias); without one, beside a tree a causal call;
compiled FlexAttention with its BlockMask; SDPA's backends with the bool mask, and K and V repeated
for each query head. No call is timed before it agrees with the first.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from common import SHAPES, Json
from options import sizes_on
from providers import PEERS, check, prepared
from timing import Timer
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flash_ext
from flash_ext import Mask
from flash_ext.cpu.tile_mask import by_query_heads

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, S, H, D) each
PLAIN = "no mask"
BOOL = ("key padding", "random")  # given as bool tensors


def cases(device: torch.device) -> list[Json]:
    """The shapes; on a CPU small ones."""
    small = SHAPES["masks"]["cpu"] if device.type == "cpu" else {}
    found = [{"batch": 1} | SHAPES["masks"]["all"] | x for x in SHAPES["masks"]["shapes"]]
    return [x | {name: n for name, n in small.items() if name in x} for x in found]


def masks_of(case: Json, device: torch.device) -> tuple[Callable[[], Mask], Mod]:
    """What makes the mask, and the same as FlexAttention's mask_mod."""
    name, seqlen, n = case["name"], case["seqlen"], case.get("n", 0)
    if name == "prefix":
        return lambda: Mask.prefix(n, seqlen, device=device), lambda b, h, i, j: (j <= i) | (j < n)
    if name == "sinks":
        width = case["window"]
        make = partial(Mask.sinks, n, (width - 1, 0), seqlen, device=device)
        return make, lambda b, h, i, j: (j <= i) & ((i - j < width) | (j < n))
    if name == "blocks":
        rows, group = case.get("queries", seqlen), case["heads"] // case["kv_heads"]
        blocks = [-(-x // 128) for x in (rows, seqlen)]
        count = max(1, int(case["share"] * blocks[1]))
        scores = torch.rand(1, case["kv_heads"], *blocks, device=device)
        index = scores.argsort(-1)[..., :count].contiguous()
        counts = torch.full(index.shape[:3], count, device=device)
        shown = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True)[0]
        make = partial(Mask.blocks, index, counts, rows, seqlen)
        return make, lambda b, h, i, j: shown[h // group, i // 128, j // 128]
    if name == "random":
        visible = torch.rand(1, 1, seqlen, seqlen, device=device) < case["share"]
        return partial(Mask.dense, visible), lambda b, h, i, j: visible[0, 0, i, j]
    if name == "tree":  # a binary one
        make = partial(Mask.tree, (torch.arange(n, device=device) - 1) // 2, seqlen - n)
        seen = make().to_dense()[0, 0]
        return make, lambda b, h, i, j: seen[i, j]
    if name == "key padding":
        lengths = torch.linspace(0.4, 1, case["batch"], device=device).mul(seqlen).long()
        visible = torch.arange(seqlen, device=device) < lengths.view(-1, 1, 1, 1)
        return partial(Mask.dense, visible, seqlen_q=seqlen), lambda b, h, i, j: j < lengths[b]
    causal = "causal" in name
    ends = [min(x, seqlen) for x in itertools.accumulate(sizes_on(device).mix, initial=0)]
    offsets = torch.tensor([*ends[:-1], seqlen], dtype=torch.int32, device=device)
    token = torch.arange(seqlen, device=device, dtype=torch.int32)
    ids = torch.searchsorted(offsets, token, right=True)
    make = partial(Mask.documents, cu_seqlens=offsets, seqlen=seqlen, causal=causal)
    if "intervals" in name:
        make = partial(Mask.intervals, offsets[ids - 1], token + 1, seqlen)
    return make, lambda b, h, i, j: (ids[i] == ids[j]) & ((i >= j) if causal else (i >= 0))


def flex_mask(case: Json, mask: Mask, mod: Mod) -> BlockMask:
    """FlexAttention's; of blocks from lists, since mask_mod of all heads takes too much memory."""
    if case["name"] != "blocks":
        batch, heads = (x if x > 1 else None for x in mask.shape[:2])
        return create_block_mask(mod, batch, heads, *mask.shape[2:], device=mask.device)
    full = by_query_heads(mask.kinds() == 1, case["heads"])
    counts, index = full.sum(-1).int(), (~full).int().argsort(stable=True).int()
    lists = torch.zeros_like(counts), index, counts, index
    return BlockMask.from_kv_blocks(*lists, mask_mod=mod, seq_lengths=mask.shape[2:])


def attends(case: Json, mask: Mask, visible: Tensor, mod: Mod) -> dict[str, Attend]:
    """The calls, ours first."""
    group = case["heads"] // case["kv_heads"]
    given: Any = {"bias": visible} if case["name"] in BOOL else {"mask": mask}
    compiled: Any = torch.compile(flex_attention) if visible.is_cuda else flex_attention
    of_flex = partial(compiled, block_mask=flex_mask(case, mask, mod), enable_gqa=True)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return of_flex(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        with PEERS[backend]().around():
            return scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)

    plain = partial(flash_ext.attention, causal=case["name"] == "tree")
    calls = {"flash_ext": partial(flash_ext.attention, **given), PLAIN: plain, "flex": flex}
    return calls | {x: partial(sdpa, x) for x in ("efficient", "cudnn") if visible.is_cuda}


def times(case: Json, timer: Timer, rounds: int) -> Json:
    """Of every call in both directions, and of making the mask."""
    make, mod = masks_of(case, timer.device)
    mask, results = make(), timer.timed({"make": make}, 0, rounds)
    if case.get("make_only"):
        return {"results": results, "density": round(float(mask.density()), 5)}
    dtype = torch.bfloat16 if timer.cuda else torch.float32
    group, of_k = case["heads"] // case["kv_heads"], (case["seqlen"], case["kv_heads"])
    shapes = [(case["batch"], *x, case["d"]) for x in ((mask.shape[2], case["heads"]), of_k, of_k)]
    q, k, v = (torch.randn(x, dtype=dtype, device=timer.device) for x in shapes)
    leaves, dout = [x.clone().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    few = (x[:1, :, :n].float() for x, n in ((q, group), (k, 1), (v, 1)))
    visible = by_query_heads(mask.to_dense(), case["heads"])
    want, _ = flash_ext.reference.attention(*few, bias=visible[:1, :group])

    def forward(attend: Attend) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(q, k, v),)

    def both(attend: Attend) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    def prepare(name: str, attend: Attend, way: Callable[..., Any]) -> Callable[[], object]:
        found = way(attend)
        if way is forward and name != PLAIN:
            check([(found[0][:1, :, :group], want)])
        return partial(way, attend)

    for way in (forward, both):
        every = attends(case, mask, visible, mod).items()
        ready, reasons = prepared(
            {f"{name} {way.__name__}": partial(prepare, name, x, way) for name, x in every}
        )
        results |= reasons | timer.timed(ready, 0, rounds)
    return {"results": results, "density": round(float(mask.density()), 5)}


def main() -> int:
    parser = common.parser(__doc__, device=True)
    parser.add_argument("--only", nargs="*", help="the names of masks")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each kind")
    recorder = common.begin("masks", args := parser.parse_args())
    chosen = [x for x in cases(recorder.device) if not args.only or x["name"] in args.only]
    for case in common.progress(chosen, len(chosen), "masks"):
        recorder.add(case, times(case, Timer(recorder.device), args.rounds))
        torch.compiler.reset()
        common.free_memory(recorder.device)
    return recorder.close(
        lambda found: any("ms" not in x for name, x in found["results"].items()
                          if name.startswith(("flash_ext", PLAIN)))
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
