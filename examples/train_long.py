"""Train a GPT on sequences that are split over GPUs.

    torchrun --nproc-per-node 4 examples/train_long.py                   # 131,072 tokens each
    torchrun --nproc-per-node 2 examples/train_long.py --device cpu      # small, with gloo

Every rank holds its rows of each sequence: embeddings, MLPs and the loss need nothing else.
Only attention does: `flash_ext.integrations.distributed.attention`, or with --method torch SDPA
under torch's context_parallel. Every rank has the whole model, and gradients are added up over the
ranks after each step. The model and its text are those of train_gpt.py.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_gpt

from flash_ext.integrations import distributed as cp  # train_gpt finds the checkout

SIZE_NAMES = ("layers", "heads", "kv_heads", "width", "seq", "steps")
SIZES = {  # by device
    "cuda": (4, 32, 8, 4096, 131072, 20),
    "cpu": (2, 4, 4, 64, 512, 30),
}


class LongGPT(train_gpt.GPT):
    """The GPT of train_gpt.py on this rank's rows, which know their positions."""

    def __init__(self, config: train_gpt.Config, attention: train_gpt.Attention, recompute: bool):
        super().__init__(config, attention)
        self.recompute = recompute

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens (B, rows) and their positions (rows); returns the last features."""
        x = self.embed(tokens) + self.position[positions]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.norm(x)

    def loss(self, features: Tensor, labels: Tensor, rows: int = 16384) -> Tensor:
        """The sum of the rows' cross entropies; the logits of so many rows exist at a time."""
        return sum(
            F.cross_entropy(self.head(x).float().flatten(0, 1), y.flatten(), reduction="sum")
            for x, y in zip(features.split(rows, 1), labels.split(rows, 1), strict=True)
        )


def add_up_gradients(model: nn.Module) -> None:
    """Each rank has the gradients of its rows' losses: their sum is that of the sequence's."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@contextmanager
def attention_of(
    config: train_gpt.Config, method: str, layout: str
) -> Iterator[train_gpt.Attention]:
    """The attention of a method, which works inside the context."""
    if method != "torch":
        yield lambda q, k, v: cp.attention(
            q, k, v, causal=True, seqlen=config.seq, method=method, layout=layout
        )
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if layout != "zigzag":
        raise ValueError("torch's context_parallel has its rows in the zigzag layout")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # with K and V of its own a head
        group = q.shape[2] // k.shape[2]
        return train_gpt.sdpa(q, *(x.repeat_interleave(group, 2) for x in (k, v)))

    device = torch.device(config.device).type
    ranks = dist.get_world_size()
    buffer = torch.zeros(2 * ranks, device=config.device)  # it cannot do without one
    mesh = init_device_mesh(device, (ranks,))
    fastest = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with (
        sdpa_kernel(fastest, set_priority=True),
        context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
    ):
        yield attention


def train(config: train_gpt.Config, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Losses per token and seconds of every step."""
    with attention_of(config, args.method, args.layout) as attention:
        return train_with(attention, config, args)


def train_with(
    attention: train_gpt.Attention, config: train_gpt.Config, args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """The same with this attention."""
    torch.manual_seed(config.seed)  # the same weights on every rank
    device = torch.device(config.device)
    model = LongGPT(config, attention, args.recompute).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, betas=(0.9, 0.95))
    positions = cp.position_ids(config.seq, layout=args.layout, device=device)
    chunks = train_gpt.batches(train_gpt.standard_library(config.megabytes), config)
    first = dist.get_rank() == 0
    bar = train_gpt.progress(config.steps, "train") if first else range(config.steps)
    losses: list[float] = []
    seconds: list[float] = []
    for _ in bar:
        chunk = next(chunks)  # (B, S + 1), the same on every rank
        tokens, labels = (cp.shard(x, layout=args.layout) for x in (chunk[:, :-1], chunk[:, 1:]))
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == torch.bfloat16):
            loss = model.loss(model(tokens, positions), labels) / (config.batch * config.seq)
        optimizer.zero_grad()
        loss.backward()
        add_up_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
        if first and hasattr(bar, "set_postfix"):
            speed = config.batch * config.seq / seconds[-1]
            bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{speed:,.0f}", refresh=False)
    return losses, seconds


def config_of(device: str, **given: int) -> train_gpt.Config:
    """The sizes for a device, of which some are given."""
    usual = dict(zip(SIZE_NAMES, SIZES[torch.device(device).type], strict=True))
    sizes = usual | given
    if "kv_heads" not in given:  # as many of the usual ones as other heads can share
        sizes["kv_heads"] = math.gcd(sizes["heads"], usual["kv_heads"])
    megabytes = max(2.0, 4e-6 * sizes["seq"])
    rate = min(3e-4, 0.2 / sizes["width"])  # wide models diverge at the others' rate
    return train_gpt.Config(**sizes, batch=1, device=device, megabytes=megabytes, rate=rate)


def parse() -> tuple[train_gpt.Config, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], help="default: the GPU, if the kernels run there")
    for name in ("layers", "heads", "kv-heads", "width", "seq", "steps"):
        add(f"--{name}", type=train_gpt.positive)
    add("--batch", type=train_gpt.positive, default=1)
    add("--method", default="auto", choices=["auto", *cp.METHODS, "torch"])
    add("--layout", default="zigzag", choices=["zigzag", "contiguous"])
    add("--recompute", action=argparse.BooleanOptionalAction, default=True,
        help="keep only the inputs of blocks for the backward pass")  # fmt: skip
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here")
    if args.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # before anything is on it
    device = args.device = args.device or train_gpt.default_device()
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    given = {name: getattr(args, name) for name in SIZE_NAMES}
    config = config_of(device, **{name: x for name, x in given.items() if x is not None})
    train_gpt.check_heads(parser, config)
    return replace(config, batch=args.batch), args


def main() -> None:
    """Train, and say the speed and the memory of every rank."""
    config, args = parse()
    if "RANK" not in os.environ:  # without torchrun: one process
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": "29400"}  # fmt: skip
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    if first:
        print(f"{config}\n{ranks} ranks, method {args.method}, layout {args.layout}", flush=True)
    train_gpt.peak_memory(config, start=True)
    losses, seconds = train(config, args)
    memory: list[float] = [0.0] * ranks
    dist.all_gather_object(memory, train_gpt.peak_memory(config))
    if first:
        step = statistics.median(seconds)
        speed = config.batch * config.seq / step
        print(f"\nloss {losses[0]:.3f} to {losses[-1]:.3f}; {step:.3f} s a step, "
              f"{speed:,.0f} tokens/s, {speed / ranks:,.0f} per rank")  # fmt: skip
        print("peak MiB by rank: " + ", ".join(f"{x:,.0f}" for x in memory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
