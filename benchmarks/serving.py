"""What serving asks for: attention to a cache, dense and in pages, each call in a CUDA graph.

    python benchmarks/serving.py
    python benchmarks/serving.py --only decode append --d 128
    python benchmarks/serving.py --device cpu          # a smoke test

decode: one query a sequence. append: the same, with the new key written first, and both rotated.
prefill: a chunk of a prompt, after what the cache has of it. mixed: one long sequence among others,
or random lengths. chunk: a prompt's beside decoding. 8 bits: decoding from a cache of e4m3 or int8.

`flash_ext` is attention_with_cache; `batch_invariant` and `dense` are the same with this option and
on a dense cache, `alone` is append's attention without it, `apart` a call for the chunk and one for
decoding, and `16 bits` the cache of 8 bits in bfloat16. Peers: SDPA's flash backend on a dense
cache, cuDNN's paged SDPA by its frontend nvidia-cudnn-frontend, and torch's varlen_attn, if it
takes pages. shapes.toml has the sizes. No call is timed before its result agrees with standard
attention in float32.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import common
import torch
from common import SHAPES, Json
from fp8_providers import cudnn_graph, cudnn_handle, planned
from providers import check, prepared
from timing import Timer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import flash_ext
import flash_ext.reference

SIZES = SHAPES["serving"]
OURS = ("flash_ext", "batch_invariant", "dense", "alone", "apart", "16 bits")
STEPS = {"e4m3": (torch.float8_e4m3fn, 1 / 16), "int8": (torch.int8, 1 / 32)}
LAST_ROWS = 64  # of each sequence, which are checked
Call = Callable[[], Tensor]


def cells(table: str, cpu: bool, head_dims: list[int] | None) -> Iterator[Json]:
    fields = SIZES["all"] | SIZES["tables"][table]
    fields |= {name: x for name, x in SIZES["cpu"].items() if cpu and name in fields}
    fields |= {"d": head_dims} if head_dims else {}
    choices = [x if isinstance(x, list) else [x] for x in fields.values()]
    for values in itertools.product(*choices):
        yield {"table": table} | dict(zip(fields, values, strict=True))


class Case:
    """The tensors of a cell: a dense cache, the same in pages, and the new rows of append."""

    def __init__(self, cell: Json, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        normal = partial(torch.randn, dtype=dtype, device=device)
        batch, queries, heads, d = (cell[x] for x in ("batch", "seqlen_q", "kv_heads", "d"))
        longest = cell["seqlen"] * cell.get("longest", 1)
        self.page = cell["page"]
        self.lengths = [longest] + [cell["seqlen"]] * (batch - 1)
        if cell.get("order") == "last":
            self.lengths.reverse()
        elif cell.get("order") == "random":
            self.lengths = [random.Random(i).randint(1, longest // 2) for i in range(batch)]
        self.queries = [cell.get("chunk", queries)] + [queries] * (batch - 1)
        self.packed = "chunk" in cell
        self.used = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        size = self.page or 1
        self.capacity = -(-longest // size) * size
        self.q = normal(sum(self.queries), cell["heads"], d)
        self.q = self.q if self.packed else self.q.view(batch, queries, *self.q.shape[1:])
        self.dense, self.table, self.options = normal(2, batch, self.capacity, heads, d), None, {}
        self.stored = self.dense
        if "cache" in cell:
            kind, step = STEPS[cell["cache"]]
            self.stored = (self.dense / step).clamp(-127, 127).round().to(kind)
            self.dense = self.stored.to(dtype) * step
            steps = torch.full((batch, heads), step, device=device)
            self.options = {"k_descale": steps, "v_descale": steps}
        self.caches = self.stored
        if self.page:
            pages = torch.randperm(batch * self.capacity // size, device=device)
            self.caches = torch.empty_like(self.stored).view(2, len(pages), size, heads, d)
            self.caches[:, pages] = self.stored.view(self.caches.shape)
            self.table = pages.view(batch, -1).to(torch.int32)
        self.new: Json = {}
        if cell["table"] == "append":
            angles = torch.rand(self.capacity, d // 2, device=device)
            self.new = {name: normal(batch, queries, heads, d) for name in "kv"}
            self.new |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}

    def last(self, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        """The rows of the last queries of each sequence. A tuple is of several calls."""
        parts = x if isinstance(x, tuple) else x.split(self.queries) if self.packed else (x,)
        rows = [y for part in parts for y in (part if part.dim() == 4 else [part])]
        return torch.cat([y[-LAST_ROWS:] for y in rows])[None]

    def exact(self) -> Tensor:
        """last() of out, in float32."""
        found, queries = [], self.q.split(self.queries) if self.packed else self.q
        for b, n in enumerate(self.lengths):
            q, (k, v) = queries[b], self.dense[:, b, :n].clone()
            if self.new:
                begin = n - len(q)
                cos, sin = (self.new[x][begin:n, None] for x in ("rotary_cos", "rotary_sin"))
                pairs = (x.float().chunk(2, -1) for x in (q, self.new["k"][b]))
                turned = [torch.cat((x * cos - y * sin, x * sin + y * cos), -1) for x, y in pairs]
                q, k[begin:], v[begin:] = turned[0].to(q.dtype), turned[1], self.new["v"][b]
            q, k, v = (x[None].float() for x in (q[-LAST_ROWS:], k, v))
            found.append(flash_ext.reference.attention(q, k, v, causal=True)[0][0])
        return torch.cat(found)[None]

    def ours(self, dense: bool = False, append: bool = True, **options: Any) -> Call:
        (k, v), table = (self.stored, None) if dense else (self.caches, self.table)
        new = self.new if append else {}
        held = self.used - self.q.shape[1] if new else self.used
        options |= self.options | new
        options |= {"cache_seqlens": held, "page_table": table, "causal": True}
        if self.packed:
            edges = torch.tensor([0, *itertools.accumulate(self.queries)], dtype=torch.int32)
            options["cu_seqlens_q"] = edges.to(self.q.device)
        return lambda: flash_ext.attention_with_cache(self.q, k, v, **options)

    def apart(self) -> Call:
        n, (k, v) = self.queries[0], self.caches
        steps = self.q[n:].view(-1, self.queries[1], *self.q.shape[1:])
        calls = [
            partial(flash_ext.attention_with_cache, q, k[of] if self.table is None else k,
                    v[of] if self.table is None else v, cache_seqlens=self.used[of], causal=True,
                    page_table=None if self.table is None else self.table[of])
            for q, of in ((self.q[None, :n], slice(1)), (steps, slice(1, None)))
        ]  # fmt: skip
        return lambda: tuple(call() for call in calls)

    def of_16_bits(self) -> Call:
        k, v = self.dense
        return partial(
            flash_ext.attention_with_cache, self.q, k, v, cache_seqlens=self.used, causal=True
        )

    def sdpa(self) -> Call:
        q, k, v = (x.transpose(1, 2) for x in (self.q, *self.dense))
        mask = causal_lower_right(q.shape[2], k.shape[2]) if q.shape[2] > 1 else None

        def call() -> Tensor:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
                return out.transpose(1, 2)

        return call

    def varlen_attn(self) -> Call:
        from torch.nn.attention.varlen import varlen_attn

        batch, queries = self.q.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=self.q.device) * queries
        return lambda: varlen_attn(
            self.q.flatten(0, 1), *self.caches, starts, None, queries, max(self.lengths),
            window_size=(-1, 0), enable_gqa=True, seqused_k=self.used, block_table=self.table,
        ).view(self.q.shape)  # fmt: skip

    def cudnn(self) -> Call:
        import cudnn

        types, handle = cudnn.data_type, cudnn_handle()
        kinds = {torch.int32: types.INT32, torch.bfloat16: types.BFLOAT16}
        graph = cudnn_graph(types.BFLOAT16)
        used, (kt, vt) = self.used.view(-1, 1, 1, 1), self.caches.transpose(2, 3)
        given = {"q": self.q.transpose(1, 2), "k": kt, "v": vt, "used_k": used,
                 "used_q": torch.full_like(used, self.q.shape[1]),
                 "table": self.table[:, None, :, None]}  # fmt: skip
        tensors = q, k, v, used_k, used_q, table = [
            graph.tensor(name=name, dim=[*x.shape], stride=[*x.stride()], data_type=kinds[x.dtype])
            for name, x in given.items()
        ]
        o, _ = graph.sdpa(
            name="sdpa", q=q, k=k, v=v, generate_stats=False, attn_scale=self.q.shape[-1] ** -0.5,
            use_padding_mask=True, seq_len_q=used_q, seq_len_kv=used_k,
            paged_attention_k_table=table, paged_attention_v_table=table,
            paged_attention_max_seq_len_kv=self.capacity,
            use_causal_mask_bottom_right=self.q.shape[1] > 1,
        )  # fmt: skip
        out = torch.empty_like(self.q)
        view = out.transpose(1, 2)
        o.set_output(True).set_dim(list(view.shape)).set_stride(list(view.stride()))
        memory = planned(graph, out.device)
        pack = dict(zip(tensors, given.values(), strict=True)) | {o: view}

        def call() -> Tensor:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(pack, memory, handle=handle)
            return out

        return call


def measure(cell: Json, timer: Timer, rounds: int) -> Json:
    """The results of all who take a cell, or why they do not."""
    case, errors = Case(cell, timer.device), {}
    kept: list[Call] = []  # the graphs read their tensors
    exact = case.exact()
    makes: dict[str, Callable[..., Call]] = {"flash_ext": case.ours}
    if not case.options:
        makes["batch_invariant"] = partial(case.ours, batch_invariant=True)
    makes |= {"dense": partial(case.ours, dense=True)} if case.page else {}
    makes |= {"alone": partial(case.ours, append=False)} if case.new else {}
    makes |= {"apart": case.apart} if case.packed else {}
    makes |= {"16 bits": case.of_16_bits} if case.options else {}
    if timer.cuda and not (case.new or case.packed or case.options):
        makes |= {"varlen_attn": case.varlen_attn, "cudnn": case.cudnn} if case.page else {}
        makes |= {"flash": case.sdpa} if len(set(case.lengths)) == 1 else {}

    def prepare(make: Callable[[], Call], name: str) -> Callable[[], object]:
        call = make()
        if name != "alone":  # which attends to other keys
            errors[name] = {"error": check([(case.last(call()), exact)])}
        if not timer.cuda:
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        kept.append(call)
        return graph.replay

    calls, found = prepared({name: partial(prepare, x, name) for name, x in makes.items()})
    read = sum(case.lengths) * 2 * case.stored[0, 0, 0].nbytes
    for name, times in timer.timed(calls, 0.05, rounds).items():
        found[name] = errors.get(name, {}) | times | {"tbps": round(read / times["ms"] * 1e-9, 4)}
    return found


@torch.no_grad()
def main() -> int:
    parser = common.parser(__doc__, device=True)
    tables = list(SIZES["tables"])
    parser.add_argument("--only", nargs="*", choices=tables, default=tables, help="some tables")
    parser.add_argument("--d", nargs="*", type=int, help="head dims, default 64 and 128")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each kind")
    args = parser.parse_args()
    recorder = common.begin("serving", args)
    timer = Timer(recorder.device)
    todo = [x for table in args.only for x in cells(table, not timer.cuda, args.d)]
    for cell in common.progress(todo, len(todo), "cells"):
        recorder.add(cell, {"providers": measure(cell, timer, args.rounds)})
        common.free_memory(recorder.device)  # one cell's graphs must not crowd out the next
    return recorder.close(lambda r: any("skipped" in r["providers"].get(n, {}) for n in OURS))


if __name__ == "__main__":
    sys.exit(main())
