"""Errors and times of all implementations at each shape."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..ops.torch_private import gpu_sleep
from ..timing import Samples, Timer, first_line
from .implementations import Implementation, Refused, implementations
from .problem import Inputs, Json, tensor_option


class Bench:
    """Measures all implementations at one shape after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # where events, which take the times, are recorded
        self.timer = Timer(self.device, gpu_sleep)
        self.cells: list[Json] = []

    def run(self) -> Iterator[None]:
        """Fill `cells`; yields after each step, `steps` times in all."""
        for shape in self.args.shapes:
            torch.manual_seed(self.args.seed)
            inputs = Inputs(shape, getattr(torch, self.args.dtype), self.device)
            options = {
                name: tensor_option(name, shape, inputs.q) if value is None else value
                for name, value in self.args.options.items()
            }
            for direction in self.args.directions:
                yield from self.cell(inputs, options, direction == "backward")
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # one shape's graphs must not crowd out the next

    def steps(self) -> int:
        """How often `run` yields."""
        rows = implementations(self.args.shapes[0], {}, self.args.fp8)
        return len(self.args.shapes) * len(self.args.directions) * (len(rows) + 1)

    def cell(self, inputs: Inputs, options: Json, backward: bool) -> Iterator[None]:
        """One table: a shape in a direction."""
        every = implementations(inputs.shape, options, self.args.fp8)
        calls: dict[str, Callable[[], object]] = {}
        estimates: dict[str, tuple[float, float]] = {}
        rows: Json = {}
        wanted = None
        if not options.get("dropout_p"):  # results that are random cannot be checked
            wanted = attempt(lambda: inputs.exact(options, backward), {})
        for one in every:
            row: Json = {}
            rows[one.name] = row

            def prepare(one: Implementation = one, row: Json = row) -> Callable[[], object] | None:
                call = prepared(one, inputs, backward)
                row["error"] = check(call(), wanted, inputs, one.limit)
                estimates[one.name] = self.timer.estimate(call)
                return call

            if call := attempt(prepare, row):
                calls[one.name] = call
            del call  # a graph that did not fit must not stay
            yield
        for name, samples in self.timed(calls, estimates, rows).items():
            us = samples.summary()["ms"] * 1e3
            tflops = inputs.shape.flops(backward, options) / us * 1e-6
            rows[name] |= {"us": round(us, 2), "tflops": float(f"{tflops:.4g}")}
            rows[name] |= {"launch_bound": True} if samples.launch_bound else {}
        cell = asdict(inputs.shape) | {
            "direction": "backward" if backward else "forward",
            "dtype": self.args.dtype,
            "options": {n: None if isinstance(x, Tensor) else x for n, x in options.items()},
            "rows": rows,
        }
        self.cells.append(with_best_peer(cell, {one.name for one in every if not one.ours}))
        yield

    def timed(
        self,
        calls: dict[str, Callable[[], object]],
        estimates: dict[str, tuple[float, float]],
        rows: Json,
    ) -> dict[str, Samples]:
        """The times of all calls. If they do not fit in memory together, without the last one."""
        while calls:
            failed: Json = {}
            timing = functools.partial(
                self.timer.compare, calls, estimates, self.args.min_time, self.args.rounds
            )
            samples: dict[str, Samples] | None = attempt(timing, failed)
            if samples is not None:
                return samples
            name, _ = calls.popitem()
            rows[name].clear()
            rows[name].update(failed)
        return {}


def attempt(function: Callable[[], Any], row: Json) -> Any:
    """What a function returns. If it fails None, and `row` has the reason as "not run"."""
    try:
        return function()
    except (torch.OutOfMemoryError, MemoryError):
        reason = "out of memory"
    except Refused as refusal:
        reason = str(refusal)
    except Exception as error:  # the failure of a peer must not end the run
        lacks_memory = "allocate memory" in str(error)  # of torch's CPU allocator
        reason = "out of memory" if lacks_memory else first_line(error)
    row.clear()
    row["not run"] = reason
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def prepared(one: Implementation, inputs: Inputs, backward: bool) -> Callable[[], tuple[Any, ...]]:
    """The call to be timed: forward without gradients, or backward on a graph made here."""
    if backward and not one.gradients:
        raise Refused("is for inference: it has no gradients")
    leaves = [x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v)]
    with torch.set_grad_enabled(backward), one.around():
        bound = one.bind(*leaves)
        if backward:
            out = bound()
            return functools.partial(
                torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True
            )

    def forward() -> tuple[Tensor]:
        with torch.no_grad(), one.around():
            return (bound(),)

    return forward


def check(results: Any, wanted: list[Tensor] | None, inputs: Inputs, limit: float) -> float | None:
    """The largest relative error, by Frobenius norms; None if it is unknown.

    Raises Refused if it exceeds the limit, or is no number.
    """
    if wanted is None:
        return None
    errors = []
    for got, want in zip(inputs.checked(results), wanted, strict=True):
        difference = got[:, -want.shape[1] :].float() - want
        errors.append(float(difference.norm() / want.norm().clamp(min=1e-30)))
    if not all(error <= limit for error in errors):
        raise Refused(f"wrong result: relative error {max(errors):.2g}")
    return float(f"{max(errors):.3g}")


def with_best_peer(cell: Json, peers: Iterable[str]) -> Json:
    """The cell with its best peer's name, and in each row the speed as a multiple of that."""
    times = {name: x["us"] for name in sorted(peers) if "us" in (x := cell["rows"].get(name, {}))}
    best = min(times, key=times.__getitem__, default=None)
    for row in cell["rows"].values():
        if best is not None and "us" in row:
            row["times_best_peer"] = float(f"{times[best] / row['us']:.4g}")
    return cell | {"best_peer": best}
