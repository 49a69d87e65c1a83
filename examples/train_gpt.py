"""Train a small language model with flash_ext, and again with standard attention, and compare.

    python examples/train_gpt.py                     # on the GPU if there is one, else on the CPU
    python examples/train_gpt.py --variant fa1 --steps 300

A byte-level GPT learns the source of Python's own standard library, which every machine has. It is
trained once with ``flash_ext.attention`` and once with standard attention, from the same weights
and on the same batches, so the two loss curves must agree. On a GPU a third training, with torch's
scaled_dot_product_attention, shows how far two correct bf16 trainings drift apart.

How to use flash_ext in a model: see ``Block.forward``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

# OpenMP threads that wait must sleep, not spin: on cores that other programs use too, spinning
# makes the small steps of the CPU training many times slower. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import flash_ext
except ModuleNotFoundError:  # not installed: use the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import flash_ext

# Causal; (B, S, H, D) in and out. k and v may have fewer heads: grouped-query attention.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------------------- attention
def flash_attention(variant: str) -> Attention:
    """The op under test. It never stores the (S, S) matrices."""
    return lambda q, k, v: flash_ext.attention(q, k, v, causal=True, variant=variant)


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same function in three passes, with S and P, both (B, H, S, S), in memory."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own fused attention, which takes (B, H, S, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


# ----------------------------------------------------------------------------------------- model
class Block(nn.Module):
    """A transformer block: attention and a two-layer perceptron, each added to its input."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        width, self.dim, self.attention = config.width, config.width // config.heads, attention
        kv_heads = config.kv_heads or config.heads
        self.heads = (config.heads, kv_heads, kv_heads)  # of q, k and v
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * self.dim, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, width)."""
        # q, k, v are strided views (B, S, H, D) of one matmul's result; flash_ext takes them as
        # they are, without a copy.
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split(self.heads, dim=2)
        x = x + self.proj(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts each next byte from the bytes before it."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.position = nn.Parameter(torch.randn(config.seq, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S), bytes as integers; returns the logits (B, S, 256)."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ------------------------------------------------------------------------------------------ data
def standard_library(megabytes: float) -> Tensor:
    """The first bytes of the standard library's modules, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    other = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    text = bytearray()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if len(text) > megabytes * 1e6:
            break
        if not other.intersection(path.relative_to(root).parts):
            text += path.read_bytes()
    if len(text) < 1e5:
        raise SystemExit(f"found only {len(text)} bytes of Python source in {root}")
    return torch.frombuffer(text, dtype=torch.uint8).long()


# -------------------------------------------------------------------------------------- training
@dataclass(frozen=True)
class Config:
    """The model and its training."""

    layers: int
    heads: int
    width: int
    seq: int
    batch: int
    steps: int
    device: str
    megabytes: float
    rate: float = 2e-3
    seed: int = 0
    kv_heads: int = 0  # 0: heads

    @property
    def dtype(self) -> torch.dtype:
        """What attention computes in."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32


CPU = Config(4, 4, 128, 256, 4, 200, "cpu", megabytes=2)
GPU = Config(6, 6, 384, 1024, 16, 300, "cuda", megabytes=8, rate=1e-3)


@dataclass
class Run:
    """The results of a training."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    def tokens_per_second(self, config: Config) -> float:
        """From the median step, so that the first steps' set-up does not count."""
        return config.batch * config.seq / statistics.median(self.seconds)


def progress(steps: int, what: str) -> object:
    """A progress bar, where tqdm is installed; otherwise a plain range."""
    try:
        from tqdm import trange
    except ImportError:
        print(f"{what}: {steps} steps (install tqdm for a progress bar)", flush=True)
        return range(steps)
    seconds = 0.1 if sys.stderr.isatty() else 10  # a log file needs few lines
    return trange(steps, desc=f"{what:<10}", dynamic_ncols=True, mininterval=seconds)


class Training:
    """A model, its optimizer and its schedule; ``step`` takes them one batch further."""

    def __init__(self, attention: Attention, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.model = GPT(config, attention).to(config.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.rate, betas=(0.9, 0.95)
        )
        warm_up = max(1, config.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(
                (step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / config.steps)
            ),
        )

    def step(self, chunk: Tensor) -> Tensor:
        """One step on a chunk (B, S + 1) of text; returns the loss before it."""
        device, dtype = self.config.device, self.config.dtype
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = self.model(chunk[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


def batches(data: Tensor, config: Config) -> Iterator[Tensor]:
    """Chunks (B, S + 1) of the text, without end; the seed's, whatever the device."""
    generator = torch.Generator().manual_seed(config.seed)
    window = torch.arange(config.seq + 1)
    while True:
        starts = torch.randint(len(data) - config.seq, (config.batch, 1), generator=generator)
        yield data[starts + window].to(config.device)


def train(name: str, attention: Attention, data: Tensor, config: Config) -> Run:
    """Train from the seed's weights on the seed's batches: only ``attention`` differs by run."""
    gc.collect()  # nothing of the training before may count as this one's memory
    training = Training(attention, config)
    chunks = batches(data, config)
    run = Run(name)
    peak_memory(config, start=True)
    bar = progress(config.steps, name)
    for _ in bar:
        begin = time.perf_counter()
        loss = training.step(next(chunks))
        run.losses.append(loss.item())  # waits for the GPU, so the time below is the step's
        run.seconds.append(time.perf_counter() - begin)
        if hasattr(bar, "set_postfix"):
            bar.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
    run.peak_mib = peak_memory(config)
    return run


def peak_memory(config: Config, start: bool = False) -> float:
    """MiB at the peak since ``start``: of the GPU's tensors, or of this process."""
    if config.device.startswith("cuda"):
        if start:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**20
    try:  # Linux can forget a process's peak
        if start:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) / 1024
    except (OSError, IndexError):
        import resource

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# ---------------------------------------------------------------------------------------- report
def agreement(ours: Run, standard: Run, reference: Run | None, config: Config) -> bool:
    """Print how far the two loss curves are apart, and whether that is rounding noise.

    The bound at a step is 2^-8 of the loss, one rounding to bf16, plus three times the largest
    difference so far between two other correct trainings, SDPA's and standard attention's.
    """
    worst, noise, within = 0.0, 0.0, True
    first_step, first_bound = 0, 0.0
    for step, (a, b) in enumerate(zip(ours.losses, standard.losses, strict=True)):
        if reference is not None:
            noise = max(noise, abs(reference.losses[step] - b))
        bound = b * 2**-8 + 3 * noise
        worst = max(worst, abs(a - b))
        if within and not abs(a - b) <= bound:  # also if a loss is NaN
            within, first_step, first_bound = False, step, bound
    print(f"largest loss difference, {ours.name} - standard: {worst:.2e}")
    if reference is not None:
        print(f"largest loss difference, {reference.name} - standard: {noise:.2e} (the reference)")
    rule = "2^-8 of the loss" + (" + 3 x the reference so far" if reference else "")
    if within:
        print(f"within rounding noise at every step (bound: {rule})")
    else:
        print(f"OUT OF BOUNDS at step {first_step}: bound {first_bound:.2e} ({rule})")
    return within


def plot(runs: list[Run], config: Config, path: Path) -> None:
    """Both loss curves in one picture, and below them their difference."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    widths = [5.0, 1.5, 1.0]
    for run, width in zip(runs, widths, strict=False):
        speed = f"{run.tokens_per_second(config):,.0f} tokens/s"
        top.plot(run.losses, linewidth=width, label=f"{run.name}, {speed}", alpha=0.8)
    top.set_ylabel("loss (nats per byte)")
    top.set_title(f"A byte-level GPT on Python's standard library, S = {config.seq}")
    top.legend()
    standard = runs[1]
    for index, run in enumerate(runs):
        if run is not standard:
            difference = [abs(a - b) for a, b in zip(run.losses, standard.losses, strict=True)]
            bottom.semilogy(difference, color=f"C{index}", label=f"{run.name} - standard")
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    bottom.legend()
    figure.savefig(path, dpi=120)
    print(f"loss curves: {path}")


def milliseconds(call: Callable[[], object], device: str, repeats: int = 10) -> float:
    """The median time of a call after a first one that warms up."""

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    call()
    times = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def variants_table(config: Config) -> dict[str, dict[str, float]]:
    """Time every variant on this device at the model's shape, beside standard attention."""
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    shape = (config.batch, config.seq, heads, config.width // heads)
    q, k, v, dout = (
        torch.randn(
            config.batch, config.seq, n, shape[-1], device=config.device, dtype=config.dtype
        )
        for n in (heads, kv_heads, kv_heads, heads)
    )
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    rows: dict[str, Attention] = {
        name: flash_attention(name) for name in flash_ext.VARIANTS
    } | {"standard": standard_attention, "SDPA": sdpa}  # fmt: skip
    reasons = flash_ext.explain(q, k, v, causal=True).reasons
    found: dict[str, dict[str, float]] = {}
    print(f"attention alone, causal, (B, S, H, D) = {shape}, {config.dtype}:")
    print(f"  {'':<10}{'forward ms':>12}{'backward ms':>13}")
    for name, attention in rows.items():
        if reasons.get(name) is not None:
            print(f"  {name:<10} does not run here: {reasons[name]}")
            continue
        out = attention(*leaves)
        forward = milliseconds(lambda f=attention: f(*leaves), config.device)
        backward = milliseconds(
            lambda o=out: torch.autograd.grad(o, leaves, dout, retain_graph=True),
            config.device,
        )
        found[name] = {"forward_ms": forward, "backward_ms": backward}
        print(f"  {name:<10}{forward:12.3f}{backward:13.3f}")
    return found


def default_device() -> str:
    """ "cuda" where flash_ext's kernels run on it, else "cpu"; says why a GPU is left unused."""
    if not torch.cuda.is_available():
        return "cpu"
    probe = torch.empty(1, 16, 1, 64, dtype=torch.bfloat16, device="cuda")
    explanation = flash_ext.explain(probe, probe, probe, causal=True)
    if explanation.variant is None:
        print(f"the GPU is not used:\n{explanation}\n")
        return "cpu"
    return "cuda"


def positive(text: str) -> int:
    """A number of steps, heads or the like, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def check_heads(parser: argparse.ArgumentParser, config: Config) -> None:
    """End with a message where the heads do not divide what they must."""
    if config.width % config.heads:
        parser.error(f"--width {config.width} must be a multiple of --heads {config.heads}")
    if config.heads % (kv_heads := config.kv_heads or config.heads):
        parser.error(f"--heads {config.heads} must be a multiple of --kv-heads {kv_heads}")


def why_no_attention(config: Config, variant: str) -> str | None:
    """Why flash_ext's variant does not train the model; None where it does."""
    dim = config.width // config.heads
    q, k = (
        torch.empty(1, config.seq, n, dim, dtype=config.dtype, device=config.device)
        for n in (config.heads, config.kv_heads or config.heads)
    )
    found = flash_ext.explain(q, k, k, causal=True, variant=variant)
    return None if found.backward else found.reasons.get(variant) or str(found)


def why_no_picture(path: Path) -> str | None:
    """Why `plot` could not write this file; None where it can, or draws nothing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        return f"a picture can be one of {', '.join(sorted(kinds))}"
    return None


def parse() -> tuple[Config, argparse.Namespace]:
    """The command line; what is not given comes from CPU or GPU above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], help="default: the GPU, if the kernels run there")
    for name in ("layers", "heads", "width", "seq", "batch", "steps"):
        cpu, gpu = getattr(CPU, name), getattr(GPU, name)
        add(f"--{name}", type=positive, help=f"default {gpu} on a GPU, {cpu} on a CPU")
    add("--kv-heads", type=positive, help="heads of k and v; default: as many as --heads")
    add("--variant", default="auto", choices=["auto", *flash_ext.VARIANTS])
    add("--yardstick", action=argparse.BooleanOptionalAction,
        help="train with SDPA too; default on a GPU")  # fmt: skip
    add("--out", type=Path, default=Path("train_gpt.png"), help="the picture")
    add("--json", type=Path, help="write losses and speeds to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here")
    args.device = args.device or default_device()
    sizes = asdict(GPU if args.device.startswith("cuda") else CPU)
    sizes |= {k: v for k, v in vars(args).items() if k in sizes and v is not None}
    config = Config(**sizes)
    check_heads(parser, config)
    if reason := why_no_attention(config, args.variant):
        parser.error(f"--variant {args.variant}: {reason}")
    if reason := why_no_picture(args.out):
        parser.error(f"--out {args.out}: {reason}")
    for path in filter(None, (args.out, args.json)):  # not only after the training
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"no folder for {path}: {error.strerror}")
    if args.yardstick is None:
        args.yardstick = args.device.startswith("cuda")
    return config, args


def main() -> int:
    """Train, compare, report; the exit status is 1 if the losses differ by more than noise."""
    config, args = parse()
    data = standard_library(config.megabytes)
    print(f"{config}\n{len(data) / 1e6:.1f} MB of Python source; flash_ext variant: {args.variant}")
    plan = {"flash_ext": flash_attention(args.variant), "standard": standard_attention}
    if args.yardstick:
        plan["SDPA"] = sdpa
    runs = [train(name, attention, data, config) for name, attention in plan.items()]

    print(f"\n  {'':<12}{'first loss':>11}{'last loss':>11}{'tokens/s':>12}{'peak MiB':>10}")
    for run in runs:
        last = statistics.fmean(run.losses[-10:])
        speed = run.tokens_per_second(config)
        print(f"  {run.name:<12}{run.losses[0]:>11.3f}{last:>11.3f}{speed:>12,.0f}"
              f"{run.peak_mib:>10,.0f}")  # fmt: skip
    within = agreement(runs[0], runs[1], runs[2] if args.yardstick else None, config)
    print()
    variants = variants_table(config)
    if args.json:
        content = {"config": asdict(config), "variant": args.variant, "within_noise": within,
                   "runs": [asdict(r) | {"tokens_per_second": r.tokens_per_second(config)}
                            for r in runs], "attention": variants}  # fmt: skip
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    plot(runs, config, args.out)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
