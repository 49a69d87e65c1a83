"""The calls that tests/sanitize.sh runs under compute-sanitizer: every kernel, tiny shapes.

Every head dim that has kernels of its own, one that is padded, whole and ragged tiles, causal and
window, dropout, aligned and unaligned rows, deterministic and not. Results are not looked at here;
tests/test_attention.py does that. Inputs are made on the host, so that under initcheck the only
device memory without a value is what the kernels should not read.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator

import torch
from attention_testing import VARIANTS, Problem, make_inputs, options_of

import flash_ext

OPTIONS = (
    {"causal": True},
    {"window": (20, 9), "dropout_p": 0.2},
    {"causal": True, "layout": "odd_offset"},
)
LENGTHS = ((33, 70), (130, 65), (40, 530))  # the last: several KV tiles of every kernel


def cases() -> Iterator[tuple[Problem, str, bool]]:
    """(problem, variant, deterministic); options and lengths rotate so that all pairs occur."""
    rotation = itertools.cycle(itertools.product(OPTIONS, LENGTHS))
    base = Problem(1, heads_q=2, heads_k=1)
    for head_dim in (40, 64, 96, 128, 192, 256):
        for _ in range(2):
            options, (seqlen_q, seqlen_k) = next(rotation)
            problem = dataclasses.replace(
                base, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, **options
            )
            for variant in VARIANTS:
                yield problem, variant, True
        yield dataclasses.replace(base, seqlen_q=65, seqlen_k=65, head_dim=head_dim), "fa2", False


def run(problem: Problem, variant: str, deterministic: bool) -> None:
    """Forward and backward, both through the ops: nothing but copies besides our kernels."""
    inputs = make_inputs(problem, "cpu")
    q, k, v, dout, dlse, rng_state = (
        None if x is None else to_device(x)
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, inputs.rng_state)
    )
    options = options_of(problem)
    options["window_left"], options["window_right"] = options.pop("window")
    options |= {"rng_state": rng_state, "deterministic": deterministic, "variant": variant}
    out, lse = torch.ops.flash_ext.fwd(q, k, v, **options)
    torch.ops.flash_ext.bwd(dout, dlse, q, k, v, out, lse, **options)
    torch.cuda.synchronize()


def to_device(x: torch.Tensor) -> torch.Tensor:
    """The same view of the same storage on the device, copied whole."""
    flat = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage()).cuda()
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


if __name__ == "__main__":
    if "--count" in sys.argv:
        print(len(list(cases())))
    else:
        for case in cases():
            run(*case)
        print(f"{sys.argv[-1]}: {len(list(cases()))} calls with flash_ext {flash_ext.__version__}")
