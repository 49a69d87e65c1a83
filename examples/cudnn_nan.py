"""Show gradients of PyTorch's attention that are NaN because of what lies beside its tensors.

    python examples/cudnn_nan.py                             # needs a GPU
    python examples/cudnn_nan.py --tokens 1101 --rounds 50   # the default is a shape of FLUX

With torch 2.11.0+cu130 on an H100, `scaled_dot_product_attention` runs cuDNN 9.19. In the backward
of this shape its kernel dot_do_o reads past the end of a tensor (compute-sanitizer: invalid reads
of 16 bytes). A training is right until a NaN lies there. Here it does in every round: free memory
is filled with NaN before each, and once again with NaN in the rows that follow the gradient of out.

Each backend gets q, k and v as transposed views of one projection's output. Its gradients are
compared with float32 standard attention. The exit status is 1 if those of flash_ext are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import flash_ext
except ModuleNotFoundError:  # not installed: use the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import flash_ext

from flash_ext.integrations import sdpa

Backend = Callable[[], contextlib.AbstractContextManager[object]]

BACKENDS: dict[str, Backend] = {
    "default": contextlib.nullcontext,
    "cuDNN": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "flash_ext": sdpa.activated,
}
POISON_BYTES, BLOCK_BYTES = 1 << 29, (1 << 20) + 512  # blocks that fill small gaps, too
ROWS_AFTER = 128
LARGEST_ERROR = 0.02
"""Of right gradients in bfloat16, relative to the largest one."""


@dataclass
class Found:
    """What a backend did in all rounds."""

    node: str
    """The autograd node, which names the kernels that ran."""
    rounds_with_nan: int
    error: float
    """The largest error of the finite rounds, relative to the largest gradient."""
    with_nan: set[str]
    """Which of dq, dk and dv had a NaN."""

    @property
    def is_right(self) -> bool:
        """Whether every gradient of every round was finite and near enough."""
        return self.rounds_with_nan == 0 and self.error < LARGEST_ERROR


def fill_free_memory(device: str) -> None:
    """Fill what the allocator has with NaN, so that the next tensors lie between NaN."""
    if device != "cuda":
        return
    block = (BLOCK_BYTES // 2,)
    blocks = [
        torch.full(block, torch.nan, dtype=torch.bfloat16, device=device)
        for _ in range(POISON_BYTES // BLOCK_BYTES)
    ]
    del blocks


def attend(qkv: Tensor) -> Tensor:
    """Attention of a projection's output (B, S, 3, H, D): (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def exact_gradients(qkv: Tensor, dout: Tensor) -> Tensor:
    """By float32 standard attention."""
    leaf = qkv.float().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(attend(leaf), leaf, dout.float())
    return gradient


def measure(backend: Backend, qkv: Tensor, dout: Tensor, rounds: int, rows_after: int) -> Found:
    """The gradients of qkv (B, S, 3, H, D) for dout (B, S, H, D), each round in new memory.

    Args:
        rows_after: so many rows of NaN follow those of dout in its memory.
    """
    exact = exact_gradients(qkv, dout)
    found = Found("", 0, 0.0, set())
    for _ in range(rounds):
        fill_free_memory(qkv.device.type)
        leaf = qkv.clone().requires_grad_()
        batch, tokens, *others = dout.shape
        dout_here = dout.new_full((batch, tokens + rows_after, *others), torch.nan)[:, :tokens]
        dout_here.copy_(dout)
        with backend():
            out = attend(leaf)
            (gradient,) = torch.autograd.grad(out, leaf, dout_here)
        found.node = out.grad_fn.next_functions[0][0].name() if out.grad_fn else ""
        if gradient.isfinite().all():
            error = (gradient.float() - exact).abs().max() / exact.abs().max()
            found.error = max(found.error, error.item())
        else:
            found.rounds_with_nan += 1
            parts = zip(("dq", "dk", "dv"), gradient.unbind(2), strict=True)
            found.with_nan |= {name for name, x in parts if not x.isfinite().all()}
    return found


def inputs(args: argparse.Namespace, device: str) -> tuple[Tensor, Tensor]:
    """qkv (B, S, 3, H, D) and the gradient of out, (B, S, H, D)."""
    shape = (args.batch, args.tokens, 4, args.heads, args.head_dim)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    return numbers[:, :, :3].contiguous(), numbers[:, :, 3].contiguous()


def report(args: argparse.Namespace, device: str) -> int:
    """Print a line for each backend and place of the NaNs; 1 if flash_ext was wrong."""
    qkv, dout = inputs(args, device)
    status = 0
    for rows_after in (0, ROWS_AFTER):
        print(f"\nNaN in free memory{f' and in {ROWS_AFTER} rows after dout' * (rows_after > 0)}")
        for name, backend in BACKENDS.items():
            try:
                found = measure(backend, qkv, dout, args.rounds, rows_after)
            except RuntimeError as error:  # a backend that this GPU or build does not have
                print(f"  {name:<10} {str(error).splitlines()[0]}")
                status |= name == "flash_ext"
                continue
            where = ", ".join(sorted(found.with_nan)) or "none"
            print(f"  {name:<10} NaN in {found.rounds_with_nan} of {args.rounds} rounds ({where}),"
                  f" otherwise off by {found.error:.2%}; {found.node}")  # fmt: skip
            status |= name == "flash_ext" and not found.is_right
    return int(status)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in (("batch", 1), ("tokens", 1101), ("heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This needs a GPU: cuDNN's attention has no CPU form.", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
          f"cuDNN {torch.backends.cudnn.version()}, flash_ext {flash_ext.__version__}")  # fmt: skip
    return report(args, "cuda")


if __name__ == "__main__":
    raise SystemExit(main())
