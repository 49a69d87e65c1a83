"""What each variant supports on a device, by running every feature on tiny inputs.

    python benchmarks/support.py          # writes benchmarks/results/<device>/support.json
    python benchmarks/support.py --ptx    # adds the PTX path alone, which takes minutes

A feature is supported forward if out and lse of its calls agree with float64 standard attention,
and backward if all gradients do. Otherwise the reason is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import common
import torch
from calls import Call, backward, forward
from common import Json
from torch import Tensor

import flash_ext

BOTH = ("forward", "backward")
FP8 = torch.float8_e4m3fn
LIMITS = {
    FP8: 6e-2, torch.int8: 6e-2, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float32: 1e-4,
    torch.float64: 1e-4,
}  # fmt: skip
HALF = torch.float16
PTX_SECONDS = 400  # of a variant


def variants(device: torch.device) -> tuple[str, ...]:
    """The columns of a device."""
    return flash_ext.CPU_VARIANTS if device.type == "cpu" else flash_ext.VARIANTS


class Ask:
    """Makes the calls of every feature, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device)

    def statistics(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def dense(
        self,
        d: int = 64,
        d_v: int | None = None,
        heads: tuple[int, int] = (2, 2),
        seqlens: tuple[int, int] = (24, 40),
        dtype: torch.dtype = HALF,
        **options: Any,
    ) -> Call:
        """A call with a batch of two."""
        (sq, sk), (hq, hk) = seqlens, heads
        q, k = self.normal(2, sq, hq, d, dtype=dtype), self.normal(2, sk, hk, d, dtype=dtype)
        return Call(q, k, self.normal(2, sk, hk, d_v or d, dtype=dtype), options)

    def packed(self, d: int = 64, d_v: int | None = None, **options: Any) -> Call:
        """Sequences of 20, 0 and 13 queries over 30, 5 and 0 keys, and three unused rows."""
        q, k, v = self.normal(36, 4, d), self.normal(38, 2, d), self.normal(38, 2, d_v or d)
        cu = {"cu_seqlens_q": self.integers(0, 20, 20, 33)}
        cu |= {"cu_seqlens_k": self.integers(0, 30, 35, 35)}
        return Call(q, k, v, cu | options)

    def biases(self, dtype: torch.dtype, gradient: bool) -> Iterator[Call]:
        """Every way of broadcasting, and one bias for packed sequences.

        A gradient summed over all keys is 0 through out alone, so the loss uses lse too.
        """

        def bias(*shape: int) -> dict[str, Tensor]:
            return {"bias": self.normal(*shape, dtype=dtype).requires_grad_(gradient)}

        shapes = itertools.product((2, 1), (2, 1), (24, 1), (40, 1))
        for call in (*(self.dense(**bias(*s)) for s in shapes), self.packed(**bias(3, 4, 20, 30))):
            yield replace(call, through_lse=gradient)

    def masks(self) -> Iterator[Call]:
        for shape in ((2, 2, 24, 40), (1, 1, 24, 40), (2, 1, 1, 40)):
            yield self.dense(bias=torch.rand(shape, device=self.device) < 0.7)

    def dropout(self) -> dict[str, Any]:
        return {"dropout_p": 0.2, "rng_state": torch.tensor([3, 4], device=self.device)}

    def int8(self) -> Iterator[Call]:
        """As `fp8`, with q and k between -127 and 127, which their descales make as large."""
        for call in self.fp8():
            descales = {name: call.options[name] for name in ("q_descale", "k_descale")}
            small = {n: 1 / 50 if x is None else x / 50 for n, x in descales.items()}
            small = {n: torch.as_tensor(x, device=self.device) for n, x in small.items()}
            q, k = (
                (50 * self.normal(*x.shape)).clamp(-127, 127).round().to(torch.int8)
                for x in (call.q, call.k)
            )
            yield replace(call, q=q, k=k, options=call.options | small)

    def fp8(self) -> Iterator[Call]:
        """Descales of each shape: numbers, by heads, by blocks and channels."""
        number, by_head = self.statistics() + 0.5, self.statistics(2, 2) + 0.5
        blocks_q, blocks_k = self.statistics(2, 4, 2) + 0.5, self.statistics(2, 2, 3) + 0.5
        channels = self.statistics(2, 2, 64) + 0.5
        for q_descale, k_descale, v_descale in (
            (None, None, None),
            (number, number[None], number),
            (by_head, by_head, by_head),
            (blocks_q, blocks_k, channels),
        ):
            given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
            call = self.dense(heads=(4, 2), seqlens=(140, 300), causal=True, **given)
            yield replace(call, q=call.q.to(FP8), k=call.k.to(FP8), v=call.v.to(FP8))

    def layouts(self) -> Iterator[Call]:
        plain = self.dense(heads=(4, 2))
        heads_first = plain.convert(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
        batch_second = plain.convert(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
        yield heads_first
        yield batch_second
        q, k, v = self.normal(2, 24, 8, 64).split((4, 2, 2), dim=2)  # of one projection
        yield Call(q, k, v)
        yield replace(plain, k=plain.k[:, :, :1].expand_as(plain.k))
        yield replace(plain, v=plain.v[:1].expand_as(plain.v))

    def unaligned(self) -> Iterator[Call]:
        def odd_rows(x: Tensor) -> Tensor:
            wide = x.new_empty(*x.shape[:2], x[0, 0].numel() + 1)[..., :-1].unflatten(
                2, x.shape[2:]
            )
            return wide.copy_(x)

        def odd_offset(x: Tensor) -> Tensor:
            return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

        yield self.dense(heads=(4, 2)).convert(odd_rows)
        yield self.dense(heads=(4, 2)).convert(odd_offset)

    def everything(self, call: Call, shape: tuple[int, ...]) -> Call:
        """All options at once."""
        heads = call.q.shape[-2]
        options = call.options | self.dropout() | {
            "causal": True, "window": (20, -1), "softcap": 30.0, "scale": 0.2,
            "alibi_slopes": self.statistics(heads),
            "bias": self.normal(*shape).requires_grad_(),
            "sink": self.statistics(heads).requires_grad_(),
            "seqused_k": self.integers(*([30, 4, 0] if call.packed else [40, 33])),
            "deterministic": True,
        }  # fmt: skip
        return replace(call, options=options, through_lse=True)


@dataclass(frozen=True)
class Feature:
    """A row of the table: calls that must all run, or a separate check."""

    calls: Callable[[Ask], Iterable[Call]] = lambda ask: [ask.dense()]
    check: Callable[[Call, str, str], str | None] | None = None  # call, variant, direction
    directions: tuple[str, ...] = BOTH
    cuda_only: bool = False


def off(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> str | None:
    """None where every tensor agrees, otherwise which does not, and by how much."""
    for name, x in got.items():
        exact = want[name].double()
        hidden = exact == -torch.inf  # lse of rows that see no key
        if not torch.equal(x == -torch.inf, hidden):
            return f"wrong result: {name} is -inf in the wrong rows"
        x, exact = (t.double().masked_fill(hidden, 0) for t in (x, exact))
        scale = exact.norm() + 1e-2 * exact.numel() ** 0.5
        error = float((x - exact).norm() / scale) if x.numel() else 0.0
        if not error <= limit:
            return f"wrong result: {name} is off by {error:.2g}"
    return None


def agrees(call: Call, variant: str, direction: str) -> str | None:
    """None where a variant's results of this call agree with standard attention in float64."""
    limit = LIMITS[call.q.dtype]
    if call.q.dtype in (FP8, torch.int8):  # the same numbers, which their descales belong to
        exact = replace(call, options=call.options | {"out_dtype": torch.float64})
    else:
        exact = call.to(torch.float64)

    def attend(c: Call) -> tuple[Tensor, Tensor]:
        return c.attend(variant)

    if direction == "forward":
        with torch.no_grad():
            got, want = attend(call), exact.exact()
        names = ("out", "lse")
        return off(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), limit)
    dout = torch.randn_like(forward(call, attend)())
    dlse = torch.randn_like(call.q[..., 0], dtype=torch.float32).transpose(-1, -2).contiguous()
    got = backward(call, attend, dout, dlse)()
    want = backward(exact, Call.exact, dout.double(), dlse.double())()
    return off(got, want, limit)


def repeats(call: Call, variant: str, direction: str) -> str | None:
    """Whether ten runs give the same bits, and right ones."""
    dout = torch.randn_like(call.q)

    def run() -> list[Tensor]:
        def attend(c: Call) -> tuple[Tensor, Tensor]:
            return c.attend(variant)

        if direction == "forward":
            return [forward(call, attend)()]
        return list(backward(call, attend, dout)().values())

    first = run()
    for _ in range(10):
        if not all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)):
            return "wrong result: differs between runs"
    return agrees(call, variant, direction)


def through(call: Call, variant: str, direction: str, wrap: Callable[[Any], Any]) -> str | None:
    """Whether attention called through ``wrap`` agrees."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_ext.attention(q, k, v, **call.options, variant=variant, return_lse=True)

    function = wrap(plain)

    class Wrapped(Call):
        def attend(self, _: str) -> tuple[Tensor, Tensor]:
            return function(self.q, self.k, self.v)

    return agrees(Wrapped(call.q, call.k, call.v, call.options), variant, direction)


def compiled(call: Call, variant: str, direction: str) -> str | None:
    """torch.compile of the whole graph; aot_eager traces all and needs no C compiler."""
    torch.compiler.reset()
    return through(
        call, variant, direction, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")
    )


def captured(call: Call, variant: str, direction: str) -> str | None:
    """Capture on some inputs, replay on others, and compare with the call outside a graph."""
    static = [x.clone() for x in (call.q, call.k, call.v)]
    dout, options = torch.randn_like(call.q), call.options | {"variant": variant}

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = torch.ops.flash_ext.fwd(q, k, v, **options)
        if direction == "forward":
            return out, lse
        return torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse, **options)[:3]

    step(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*static)
    inputs = [torch.randn_like(x) for x in static]
    for x, fresh in zip(static, inputs, strict=True):
        x.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    names = [f"result {i}" for i in range(len(results))]
    want = step(*inputs)
    return off(dict(zip(names, results, strict=True)), dict(zip(names, want, strict=True)),
               LIMITS[HALF])  # fmt: skip


def head_dims(ask: Ask, step: int = 1) -> Iterator[Call]:
    largest = max(d for d, _ in flash_ext.KERNEL_DIMS)
    return (ask.dense(d=d, seqlens=(9, 17)) for d in range(step, largest + 1, step))


def features() -> dict[str, Feature]:
    """The rows, in the order of the table."""
    largest = max(d for d, _ in flash_ext.KERNEL_DIMS)
    return {
        "float16": Feature(),
        "bfloat16": Feature(lambda a: [a.dense(dtype=torch.bfloat16)]),
        "float32, float64": Feature(
            lambda a: (a.dense(dtype=x) for x in (torch.float32, torch.float64))
        ),
        "FP8 (float8_e4m3fn), descales of every shape": Feature(Ask.fp8),
        "q and k in int8, v in FP8": Feature(Ask.int8, directions=("forward",)),
        f"head dims up to {largest}, multiples of 8": Feature(lambda a: head_dims(a, 8)),
        "every other head dim": Feature(head_dims),
        "head dim of v unlike q's, multiples of 8": Feature(
            lambda a: (a.dense(*x) for x in ((192, 128), (128, 64), (40, 256)))
        ),
        "the same, others": Feature(lambda a: (a.dense(*x) for x in ((63, 128), (64, 1)))),
        "causal, Sq and Sk unequal": Feature(
            lambda a: (a.dense(seqlens=x, causal=True) for x in ((24, 40), (40, 24), (1, 70)))
        ),
        "window": Feature(lambda a: (a.dense(window=w) for w in ((4, -1), (-1, 4), (4, 4)))),
        "scale": Feature(lambda a: [a.dense(scale=0.3)]),
        "grouped and multi-query heads": Feature(
            lambda a: (a.dense(heads=x) for x in ((4, 2), (6, 2), (4, 1)))
        ),
        "any strides (heads first, packed qkv, expanded)": Feature(Ask.layouts),
        "unaligned rows and addresses": Feature(Ask.unaligned),
        "dropout": Feature(lambda a: [a.dense(**a.dropout()), a.packed(**a.dropout())]),
        "softcap": Feature(lambda a: [a.dense(softcap=5.0), a.packed(softcap=5.0)]),
        "ALiBi, slopes (H) and (B, H)": Feature(
            lambda a: (a.dense(alibi_slopes=a.statistics(*x)) for x in ((2,), (2, 2)))
        ),
        "bias, every broadcast, float32 too": Feature(
            lambda a: (c for x in (HALF, torch.float32) for c in a.biases(x, False))
        ),
        "gradient of bias": Feature(
            lambda a: (c for x in (HALF, torch.float32) for c in a.biases(x, True)),
            directions=("backward",),
        ),
        "bool mask": Feature(Ask.masks),
        "sink": Feature(lambda a: [a.dense(sink=a.statistics(2)), a.packed(sink=a.statistics(4))]),
        "gradient of sink": Feature(
            lambda a: [
                a.dense(sink=a.statistics(2).requires_grad_()),
                a.packed(sink=a.statistics(4).requires_grad_()),
            ],
            directions=("backward",),
        ),
        "packed sequences (attention_varlen)": Feature(
            lambda a: [a.packed(), a.packed(causal=True), a.packed(d=128, d_v=64)]
        ),
        "seqused_k": Feature(
            lambda a: [
                a.dense(seqused_k=a.integers(33, 0), causal=True),
                a.packed(seqused_k=a.integers(20, 3, 0)),
            ]
        ),
        "gradient of lse": Feature(
            lambda a: (replace(c, through_lse=True) for c in (a.dense(), a.packed())),
            directions=("backward",),
        ),
        "all options at once": Feature(
            lambda a: [
                a.everything(a.dense(heads=(4, 2), d_v=32), (1, 4, 24, 1)),
                a.everything(a.packed(d_v=32), (1, 4, 20, 30)),
            ]
        ),
        "deterministic, bit by bit": Feature(
            lambda a: [a.dense(seqlens=(300, 300), deterministic=True)], repeats
        ),
        "torch.compile, whole graph": Feature(lambda a: [a.dense(causal=True)], compiled),
        "CUDA graphs": Feature(lambda a: [a.dense(causal=True)], captured, cuda_only=True),
        PTX: Feature(lambda a: [], cuda_only=True),
    }


PTX = "PTX path (GPUs newer than the build)"


def why_not(feature: Feature, ask: Ask, variant: str, direction: str) -> str | None:
    """None if every call of a feature is right, otherwise the first reason."""
    torch.manual_seed(0)
    check = feature.check or agrees
    try:
        return next((r for c in feature.calls(ask) if (r := check(c, variant, direction))), None)
    except Exception as error:
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """A refusal in the package's own words, or "failed: " and the error; without paths."""
    # C++ puts the place in the source before the words.
    _, own, words = str(error).partition("\n")[0].partition("flash_ext: ")
    if own and not words.startswith("the CUDA launch failed"):
        return words
    return "failed: " + (words or re.sub(r"(?<!\w)/\S*/", "", common.first_line(error)))


def probe(device: torch.device, only: Iterable[str] | None = None) -> Json:
    """feature -> variant -> direction -> None where it is supported, otherwise why not."""
    ask = Ask(device)
    return {
        name: {
            variant: {d: why_not(feature, ask, variant, d) for d in feature.directions}
            for variant in variants(device)
        }
        for name, feature in features().items()
        if name != PTX and not (feature.cuda_only and device.type != "cuda")
        if only is None or name in only
    }


def ptx_answers(variant: str) -> dict[str, str | None]:
    """direction -> None if a variant's kernels made from PTX are right.

    For a process with CUDA_FORCE_PTX_JIT=1. torch's own kernels may not run there, so only ours do.
    """
    call = Ask(torch.device("cpu")).dense(seqlens=(40, 40))
    dout, exact = torch.randn_like(call.q), call.to(torch.float64)
    q, k, v, gpu_dout = (x.cuda() for x in (call.q, call.k, call.v, dout))
    out, lse = torch.ops.flash_ext.fwd(q, k, v, variant=variant)
    grads = torch.ops.flash_ext.bwd(gpu_dout, None, q, k, v, out, lse, variant=variant)
    want_out, want_lse = exact.exact()
    want = backward(exact, Call.exact, dout.double())()
    got = {name: x.cpu() for name, x in zip(("dq", "dk", "dv"), grads, strict=False)}
    return {
        "forward": off({"out": out.cpu(), "lse": lse.cpu()}, {"out": want_out, "lse": want_lse},
                       LIMITS[HALF]),
        "backward": off(got, want, LIMITS[HALF]),
    }  # fmt: skip


def probe_ptx() -> Json:
    """variant -> ``ptx_answers`` of a process that makes every kernel from its PTX.

    Each variant has its own: after an error on the GPU a process has no right answer any more.
    """
    answers: Json = {"fa3": dict.fromkeys(BOTH, "fa3 is machine code for Hopper GPUs alone")}
    environment = os.environ | {"CUDA_FORCE_PTX_JIT": "1", "CUDA_MODULE_LOADING": "LAZY"}
    for variant in flash_ext.VARIANTS[:2]:
        command = [sys.executable, __file__, "--ptx-child", variant]
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, timeout=PTX_SECONDS, check=True
            )
            answers[variant] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            answers[variant] = dict.fromkeys(BOTH, f"failed: no answer within {PTX_SECONDS} s")
        except subprocess.CalledProcessError as died:  # it has said why on stderr
            reason = f"failed: its process ended with status {died.returncode}"
            answers[variant] = dict.fromkeys(BOTH, reason)
    return answers


def main() -> int:
    """Ask the device everything and write support.json; status 1 for what is wrong or fails."""
    parser = common.parser(__doc__)
    common.add_device(parser)
    parser.add_argument("--ptx", action="store_true", help="only the PTX path: minutes")
    parser.add_argument("--ptx-child", metavar="VARIANT", help=argparse.SUPPRESS)
    parser.add_argument("--out", help="default benchmarks/results/<device>/support.json")
    args = parser.parse_args()
    if args.ptx_child:
        try:
            answers = ptx_answers(args.ptx_child)
        except Exception as error:
            answers = dict.fromkeys(BOTH, reason_of(error))
        print(json.dumps(answers))
        return 0
    device = torch.device(args.device)
    path = common.result_path(device, "support.json", args.out)
    result = common.describe_setup(device)
    known = common.earlier(path, result).get("support", {})
    found = {PTX: probe_ptx()} if args.ptx else probe(device)
    result["support"] = known | found
    common.write_json(path, result)
    reasons = [
        (f"{variant} {direction}, {name}", reason)
        for name, by_variant in found.items()
        for variant, by_direction in by_variant.items()
        for direction, reason in by_direction.items()
    ]
    for where, reason in reasons:
        print(f"{where}: {reason or 'yes'}")
    print(f"written: {path}")
    return int(any(reason and reason.startswith(("wrong", "failed")) for _, reason in reasons))


if __name__ == "__main__":
    sys.exit(main())
