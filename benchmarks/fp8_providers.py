"""FP8 attention: quantized inputs, the ways to get them, and the providers that take them."""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from providers import BEST_OF, Attend, Provider, Refused, Workload
from torch import Tensor

import flash_ext
import flash_ext.reference
from flash_ext import fp8

SCALE_ROWS = 128  # rows of a block
LARGEST = torch.finfo(torch.float8_e4m3fn).max
FP8 = "fp8"  # the dtype of cells of FP8 attention


class Quantized(NamedTuple):
    """8-bit numbers and what they are multiplied by, as `flash_ext.attention` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def descales(self) -> dict[str, Tensor | None]:
        """The three, by the name of their option."""
        return {name: getattr(self, name) for name in ("q_descale", "k_descale", "v_descale")}

    def first_queries(self, rows: int) -> Quantized:
        """Only the first rows of q."""
        descale = self.q_descale
        if descale is not None and descale.dim() == 3:
            descale = descale[..., : (rows + SCALE_ROWS - 1) // SCALE_ROWS].contiguous()
        return self._replace(q=self.q[:, :rows], q_descale=descale)

    def attend(self, causal: bool = False, out_dtype: torch.dtype = torch.float16) -> Tensor:
        """out of the variant that explain chooses."""
        return flash_ext.attention(
            self.q, self.k, self.v, causal=causal, out_dtype=out_dtype, **self.descales
        )

    def exact(self) -> Tensor:
        """out in float64, where nothing is rounded, without a mask."""
        found: Tensor = flash_ext.reference.attention(
            self.q, self.k, self.v, out_dtype=torch.float64, **self.descales
        )[0]
        return found


@dataclass(frozen=True)
class Method:
    """How float16 or bfloat16 becomes FP8; see `flash_ext.fp8.quantize`."""

    scales: str  # of q and k
    scales_v: str
    rotated: bool = False
    smooth: bool = False  # is the mean of k subtracted?
    qk_dtype: torch.dtype = torch.float8_e4m3fn

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seed: int = 0) -> Quantized:
        """Quantize; the rotation's signs are the seed's."""
        signs = None
        if self.rotated:
            generator = torch.Generator().manual_seed(seed)
            signs = fp8.random_signs(q.shape[-1], generator=generator).to(q.device)
        mean = fp8.token_mean(k) if self.smooth else None
        pairs = (
            fp8.quantize(q, self.qk_dtype, scales=self.scales, signs=signs),
            fp8.quantize(k, self.qk_dtype, scales=self.scales, signs=signs, mean=mean),
            fp8.quantize(v, scales=self.scales_v),
        )
        numbers, descales = zip(*pairs, strict=True)
        return Quantized(*numbers, *descales)


PER_TENSOR = "one scale per tensor"
OURS_IN_FP8 = "flash_ext.fp8.attention in FP8: the same, with v by channels"
OURS = "flash_ext.fp8.attention: the same, with q and k in int8"
METHODS = {
    PER_TENSOR: Method("tensor", "tensor"),
    "one scale per tensor, rotation": Method("tensor", "tensor", rotated=True),
    "one scale per head": Method("head", "head"),
    "blocks of q and k, v by heads": Method("block", "head"),
    "blocks and rotation": Method("block", "head", rotated=True),
    "blocks and rotation, mean of k subtracted": Method("block", "head", True, True),
    OURS_IN_FP8: Method("block", "channel", rotated=True, smooth=True),
    OURS: Method("block", "channel", rotated=True, smooth=True, qk_dtype=torch.int8),
}


# ------------------------------------------------------------------------------------- providers
def not_called(*_: object) -> Tensor:
    """`Fp8Provider.prepare` is."""
    raise NotImplementedError


@dataclass(frozen=True)
class Fp8Provider(Provider):
    """FP8 attention on inputs that were quantized before; only an `Fp8Workload` asks it."""

    attend: Attend = not_called
    limits: tuple[float, float] = (6e-2, 2e-1)  # P is rounded to e4m3
    fp8: bool = True

    def prepare(self, x: Quantized, causal: bool) -> Callable[[], Tensor]:
        """The call to be timed."""
        raise NotImplementedError

    def unit(self, x: Quantized) -> float:
        """What a result is multiplied by."""
        return 1.0


@dataclass(frozen=True)
class Fp8Variant(Fp8Provider):
    """flash_ext's fa3 with output in bfloat16.

    It gets the scale of a tensor as scales of blocks and channels, which are what
    `flash_ext.fp8.attention` makes, so that their cost counts.
    """

    int8: bool = False  # q and k, with the scale of a tensor too

    @property
    def ours(self) -> bool:
        return True

    def prepare(self, x: Quantized, causal: bool) -> Callable[[], Tensor]:
        if self.int8:
            x = with_int8(x)
        batch, _, kv_heads, _ = x.k.shape
        assert x.q_descale is not None and x.k_descale is not None and x.v_descale is not None
        blocks = [-(-y.shape[1] // SCALE_ROWS) for y in (x.q, x.k)]
        descales = {
            "q_descale": x.q_descale.expand(batch, x.q.shape[2], blocks[0]).contiguous(),
            "k_descale": x.k_descale.expand(batch, kv_heads, blocks[1]).contiguous(),
            "v_descale": x.v_descale.expand(batch, kv_heads, x.v.shape[3]).contiguous(),
        }
        reason = flash_ext.explain(x.q, x.k, x.v, causal=causal, **descales).reasons["fa3"]
        if reason is not None:
            raise Refused(reason)
        q, k, v = x[:3]
        return lambda: flash_ext.attention(q, k, v, causal=causal, variant="fa3", **descales)


def with_int8(x: Quantized) -> Quantized:
    """The same with q and k rounded to int8."""
    numbers, descales = [], []
    for y, descale in ((x.q, x.q_descale), (x.k, x.k_descale)):
        assert descale is not None
        factor = y.float().abs().max() / torch.iinfo(torch.int8).max
        numbers.append((y.float() / factor).round().to(torch.int8))
        descales.append(descale * factor)
    return Quantized(*numbers, x.v, *descales, x.v_descale)


@functools.cache
def cudnn_handle() -> Any:
    """nvidia-cudnn-frontend's handle, on the current stream."""
    cudnn = importlib.import_module("cudnn")
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return handle


class CudnnFp8(Fp8Provider):
    """cuDNN's FP8 forward through nvidia-cudnn-frontend, whose output on Hopper is FP8 too.

    It takes one scale per tensor. P is at most 1: its scale leaves most of the range of e4m3 to
    weights that are small. Results are means of rows of V, so the output's scale is that of V's
    largest number: nothing saturates, and of 16,384 keys little vanishes.
    """

    P_SCALE = 16.0

    def prepare(self, x: Quantized, causal: bool) -> Callable[[], Tensor]:
        cudnn = importlib.import_module("cudnn")
        types, handle = cudnn.data_type, cudnn_handle()
        graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )

        def tensor(name: str, like: Tensor) -> Any:
            heads_first = like.transpose(1, 2)
            dim, stride = list(heads_first.shape), list(heads_first.stride())
            return graph.tensor(name=name, dim=dim, stride=stride, data_type=types.FP8_E4M3)

        def number(name: str) -> Any:
            ones = [1] * 4
            return graph.tensor(name=name, dim=ones, stride=ones, data_type=types.FLOAT)

        device = x.q.device
        scales = {
            "descale_q": x.q_descale,
            "descale_k": x.k_descale,
            "descale_v": x.v_descale,
            "descale_s": torch.tensor(1 / self.P_SCALE, device=device),
            "scale_s": torch.tensor(self.P_SCALE, device=device),
            "scale_o": torch.tensor(self.unit(x), device=device),
        }
        inputs = {name: tensor(name, getattr(x, name)) for name in ("q", "k", "v")}
        numbers = {name: number(name) for name in scales}
        result, _, *maxima = graph.sdpa_fp8(
            **inputs, **numbers, attn_scale=x.q.shape[-1] ** -0.5, generate_stats=False,
            use_causal_mask=causal, name="attention",
        )  # fmt: skip

        out = torch.empty((*x.q.shape[:3], x.v.shape[3]), dtype=x.v.dtype, device=device)
        heads_first = out.transpose(1, 2)
        result.set_output(True).set_data_type(types.FP8_E4M3)
        result.set_dim(list(heads_first.shape)).set_stride(list(heads_first.stride()))
        # Where cuDNN finds each of its tensors.
        memory = {one: getattr(x, name).view(torch.uint8) for name, one in inputs.items()}
        memory |= {one: scales[name].reshape(1) for name, one in numbers.items()}
        memory[result] = out.view(torch.uint8)
        for one in (y for y in maxima if y is not None):  # the largest P, the largest result
            one.set_output(True).set_data_type(types.FLOAT).set_dim([1] * 4).set_stride([1] * 4)
            memory[one] = torch.zeros(1, device=device)

        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(1, graph.get_workspace_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=device)

        def call() -> Tensor:
            graph.execute(memory, workspace, handle=handle)
            return out

        return call

    def unit(self, x: Quantized) -> float:
        largest = float(x.v.float().abs().max() * x.v_descale)
        return 2.0 ** math.floor(math.log2(LARGEST / largest)) if largest else 1.0


class PackageFp8(Fp8Provider):
    """FlashAttention-3's own FP8 forward, with a scale per head and output in bfloat16.

    From its own package, or from fa3-fwd, a build of the forward alone.
    """

    MODULES = ("flash_attn_interface", "fa3_fwd_interface")

    def prepare(self, x: Quantized, causal: bool) -> Callable[[], Tensor]:
        module = next(filter(importlib.util.find_spec, self.MODULES), self.MODULES[0])
        function = importlib.import_module(module).flash_attn_func
        heads = x.k.shape[0], x.k.shape[2]
        descales = {
            name: y.expand(heads).contiguous() for name, y in x.descales.items() if y is not None
        }

        def call() -> Tensor:
            result = function(*x[:3], causal=causal, **descales)
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out

        return call


def whole_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """From bfloat16 inputs, quantization included."""
    return fp8.attention(q, k, v, causal=causal)


FP8_PROVIDERS: tuple[Provider, ...] = (
    Fp8Variant("fa3_fp8"),
    Fp8Variant("fa3_int8", int8=True),
    Provider("fp8_attention", whole_call, limits=Fp8Provider.limits, fp8=True),
    PackageFp8("flash_attn_3_fp8"),
    CudnnFp8("cudnn_fp8", limits=(1e-1, 3e-1)),  # its output is rounded as well
)


class Fp8Workload(Workload):
    """Inputs in bfloat16, and the same as FP8 numbers with one scale per tensor.

    Providers of FP8 get the numbers, and are held against the exact results of what these stand
    for; others get the bfloat16 inputs.
    """

    BESIDE = ("fa3", *BEST_OF, "flash")  # who is measured beside FP8

    def __init__(
        self, shape: tuple[int, int, int, int], device: torch.device, d_v: int = 0
    ) -> None:
        super().__init__(shape, torch.bfloat16, device, d_v=d_v)
        self.numbers = METHODS[PER_TENSOR](self.q, self.k, self.v)
        self.of_numbers: list[Tensor] = []

    def asked(self, providers: Iterable[Provider]) -> list[Provider]:
        names = (*self.BESIDE, *(p.name for p in FP8_PROVIDERS))
        return [p for p in providers if p.name in names]

    def exact(self, causal: bool, gradients: bool) -> list[Tensor]:
        dequantized = copy.copy(self)
        dequantized.q, dequantized.k, dequantized.v = (
            x.float() * descale
            for x, descale in zip(self.numbers[:3], self.numbers[3:], strict=True)
        )
        self.of_numbers = Workload.exact(dequantized, causal, gradients=False)
        return super().exact(causal, gradients)

    def wanted(self, provider: Provider, exact: list[Tensor]) -> list[Tensor]:
        if not isinstance(provider, Fp8Provider):
            return exact
        return [x * provider.unit(self.numbers) for x in self.of_numbers]

    def bare(self, provider: Provider, causal: bool) -> Callable[[], Tensor]:
        if not isinstance(provider, Fp8Provider):
            return super().bare(provider, causal)
        return provider.prepare(self.numbers, causal)
