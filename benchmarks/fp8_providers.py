"""8 bits: quantized inputs, the ways to get them, and the providers that take them.

FP8 is attention on q, k and v in 8 bits, KV8 on k and v alone, beside a q in bfloat16.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from providers import BEST_OF, FLASH_ATTN_3, Attend, Provider, Refused, Workload, flash_attn
from torch import Tensor

import flash_ext
import flash_ext.reference
from flash_ext import fp8
from flash_ext.cpu import transposed_v

SCALE_ROWS = 128  # rows of a block
LARGEST = torch.finfo(torch.float8_e4m3fn).max
FP8, KV8 = "fp8", "kv8"  # the dtypes of cells


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
            descale = descale[..., : -(-rows // SCALE_ROWS)].contiguous()
        return self._replace(q=self.q[:, :rows], q_descale=descale)

    def attend(self, causal: bool = False, out_dtype: torch.dtype = torch.float16) -> Tensor:
        """out of the variant that explain chooses."""
        options = {"causal": causal, "out_dtype": out_dtype} | self.descales
        return flash_ext.attention(self.q, self.k, self.v, **options)

    def dequantized(self) -> Iterator[Tensor]:
        """What q, k and v stand for: in float32, beside a q of 16 bits in its type."""
        dtype = torch.float32 if self.q.element_size() == 1 else self.q.dtype
        for x, descale in zip(self[:3], self[3:], strict=True):
            product = flash_ext.reference._scaled(x.float(), descale, by_row=x is not self.v)
            yield product.to(dtype)

    def exact(self) -> Tensor:
        """out in float64, where nothing is rounded, without a mask."""
        exactly = {"out_dtype": torch.float64} | self.descales
        return flash_ext.reference.attention(self.q, self.k, self.v, **exactly)[0]


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
        of_qk = functools.partial(
            fp8.quantize, dtype=self.qk_dtype, scales=self.scales, signs=signs
        )
        pairs = of_qk(q), of_qk(k, mean=mean), fp8.quantize(v, scales=self.scales_v)
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


@dataclass(frozen=True)
class KeysAndValues:
    """How k, by blocks of keys, and v, by channels, become 8 bits beside a q as it is."""

    dtype: torch.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
        k8, k_descale = fp8.quantize(k, self.dtype)
        if self.dtype == torch.int8:
            v_descale = v.abs().amax(1).float() / torch.iinfo(self.dtype).max
            rows = zip(v, v_descale, strict=True)
            v8 = torch.stack([(x / y).round().to(self.dtype) for x, y in rows])
        else:
            v8, v_descale = fp8.quantize(v, self.dtype, scales="channel")
        return Quantized(q, k8, v8, None, k_descale, v_descale)


# ------------------------------------------------------------------------------------- providers
@dataclass(frozen=True)
class QuantizedProvider(Provider):
    """Attention on inputs that were quantized before; only a `QuantizedWorkload` asks it, by
    `prepare`, which makes the call to be timed."""

    attend: Attend = Tensor  # not called: `prepare` is
    limits: tuple[float, float] = (6e-2, 2e-1)  # P is rounded to e4m3
    fp8: bool = True
    quantize: Callable[[Tensor, Tensor, Tensor], Quantized] = METHODS[PER_TENSOR]

    def unit(self, x: Quantized) -> float:
        """What a result is multiplied by."""
        return 1.0


@dataclass(frozen=True)
class Fa3(QuantizedProvider):
    """flash_ext's fa3 with output in bfloat16.

    It gets the scale of a tensor as scales of blocks and channels, which are what
    `flash_ext.fp8.attention` makes, so that their cost counts; and v transposed, as that has it."""

    ours = True

    def prepare(self, x: Quantized, causal: bool) -> Callable[[], Tensor]:
        q, k, v = x[:3]
        ends = [-(-y.shape[1] // SCALE_ROWS) for y in (q, k)] + [v.shape[3]]  # of each descale
        descales = {
            name: descale.expand(y.shape[0], y.shape[2], end).contiguous()
            for (name, descale), y, end in zip(x.descales.items(), (q, k, v), ends, strict=True)
            if descale is not None
        }
        options: dict[str, Any] = {"causal": causal} | descales
        if q.element_size() == 1:
            v, options["v_transposed"] = transposed_v.from_rows(v, None), True
        reason = flash_ext.explain(q, k, v, **options).reasons["fa3"]
        if reason is not None:
            raise Refused(reason)
        return lambda: flash_ext.attention(q, k, v, variant="fa3", **options)


@functools.cache
def cudnn_handle() -> Any:
    """nvidia-cudnn-frontend's handle, on the current stream."""
    cudnn = importlib.import_module("cudnn")
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return handle


def cudnn_graph(io_type: Any) -> Any:
    """An empty graph of cuDNN's, which computes in float32."""
    cudnn = importlib.import_module("cudnn")
    types = {"intermediate_data_type": cudnn.data_type.FLOAT, "io_data_type": io_type}
    return cudnn.pygraph(**types, compute_data_type=cudnn.data_type.FLOAT, handle=cudnn_handle())


def planned(graph: Any, device: torch.device) -> Tensor:
    """Chooses the kernels of a graph of cuDNN's; returns its workspace."""
    modes = importlib.import_module("cudnn").heur_mode
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([modes.A, modes.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)


class CudnnFp8(QuantizedProvider):
    """cuDNN's FP8 forward through nvidia-cudnn-frontend, whose output on Hopper is FP8 too.

    It takes one scale per tensor. P is at most 1: its scale leaves most of the range of e4m3 to
    weights that are small. Results are means of rows of V, so the output's scale is that of V's
    largest number: nothing saturates, and of 16,384 keys little vanishes."""

    P_SCALE = 16.0

    def prepare(self, x: Quantized, causal: bool) -> Callable[[], Tensor]:
        types, handle = importlib.import_module("cudnn").data_type, cudnn_handle()
        graph = cudnn_graph(types.FP8_E4M3)

        def tensor(name: str, like: Tensor, kind: Any) -> Any:
            dim, stride = list(like.shape), list(like.stride())
            return graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)

        device = x.q.device
        scales = {
            "descale_q": x.q_descale, "descale_k": x.k_descale, "descale_v": x.v_descale,
            "descale_s": torch.tensor(1 / self.P_SCALE, device=device),
            "scale_s": torch.tensor(self.P_SCALE, device=device),
            "scale_o": torch.tensor(self.unit(x), device=device),
        }  # fmt: skip
        inputs = {name: tensor(name, getattr(x, name).transpose(1, 2), types.FP8_E4M3)
                  for name in ("q", "k", "v")}  # fmt: skip
        one = torch.ones(1, 1, 1, 1)
        numbers = {name: tensor(name, one, types.FLOAT) for name in scales}
        result, _, *maxima = graph.sdpa_fp8(
            **inputs, **numbers, attn_scale=x.q.shape[-1] ** -0.5, generate_stats=False,
            use_causal_mask=causal, name="attention",
        )  # fmt: skip

        out = torch.empty((*x.q.shape[:3], x.v.shape[3]), dtype=x.v.dtype, device=device)
        heads_first = out.transpose(1, 2)
        result.set_output(True).set_data_type(types.FP8_E4M3)
        result.set_dim(list(heads_first.shape)).set_stride(list(heads_first.stride()))
        # Where cuDNN finds each of its tensors.
        memory = {y: getattr(x, name).view(torch.uint8) for name, y in inputs.items()}
        memory |= {y: scales[name].reshape(1) for name, y in numbers.items()}
        memory[result] = out.view(torch.uint8)
        for most in (y for y in maxima if y is not None):  # the largest P, the largest result
            most.set_output(True).set_data_type(types.FLOAT).set_dim([1] * 4).set_stride([1] * 4)
            memory[most] = torch.zeros(1, device=device)
        workspace = planned(graph, device)

        def call() -> Tensor:
            graph.execute(memory, workspace, handle=handle)
            return out

        return call

    def unit(self, x: Quantized) -> float:
        largest = float(x.v.float().abs().max() * x.v_descale)
        return 2.0 ** math.floor(math.log2(LARGEST / largest)) if largest else 1.0


class PackageFp8(QuantizedProvider):
    """FlashAttention-3's own FP8 forward, with a scale per head and output in bfloat16.

    From its own package, or from fa3-fwd, a build of the forward alone."""

    def prepare(self, x: Quantized, causal: bool) -> Callable[[], Tensor]:
        function = flash_attn(*FLASH_ATTN_3)
        heads = x.k.shape[0], x.k.shape[2]
        descales = {n: y.expand(heads).contiguous() for n, y in x.descales.items() if y is not None}

        def call() -> Tensor:
            result = function(*x[:3], causal=causal, **descales)
            return result[0] if isinstance(result, tuple) else result

        return call


def whole_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """From bfloat16 inputs, quantization included."""
    return fp8.attention(q, k, v, causal=causal)


FP8_PROVIDERS: tuple[Provider, ...] = (
    Fa3("fa3_fp8"),
    Fa3("fa3_int8", quantize=Method("block", "tensor", qk_dtype=torch.int8)),
    Provider("fp8_attention", whole_call, limits=QuantizedProvider.limits, fp8=True),
    PackageFp8("flash_attn_3_fp8"),
    CudnnFp8("cudnn_fp8", limits=(1e-1, 3e-1)),  # its output is rounded as well
)
KV8_PROVIDERS: tuple[Provider, ...] = tuple(
    Fa3(name, limits=Provider.limits, quantize=KeysAndValues(dtype))
    for name, dtype in (("fa3_e4m3_kv", torch.float8_e4m3fn), ("fa3_int8_kv", torch.int8))
)
PROVIDERS = {FP8: FP8_PROVIDERS, KV8: KV8_PROVIDERS}
# Who is measured beside them on the bfloat16 inputs.
BESIDE = {FP8: ("fa3", *BEST_OF, "flash"), KV8: ("fa3", "flash_attn_3")}


class QuantizedWorkload(Workload):
    """Inputs in bfloat16, and the same as each of the providers of `dtype` quantizes them.

    These get the numbers, and are held against the exact results of what the numbers stand for;
    others get the bfloat16 inputs."""

    def __init__(
        self, dtype: str, shape: tuple[int, int, int, int], device: torch.device, **sizes: int
    ) -> None:
        super().__init__(shape, torch.bfloat16, device, **sizes)
        self.asks = *BESIDE[dtype], *(p.name for p in PROVIDERS[dtype])
        quantizing = (p.quantize for p in PROVIDERS[dtype] if isinstance(p, QuantizedProvider))
        self.numbers = {each: each(self.q, self.k, self.v) for each in dict.fromkeys(quantizing)}
        self.of_numbers: dict[Hashable, list[Tensor]] = {}
        if dtype == KV8:
            self.CHUNK_BYTES = 1 << 24  # heads have up to 131,072 keys, and one query

    def asked(self, providers: Iterable[Provider]) -> list[Provider]:
        return [p for p in providers if p.name in self.asks]

    def exact(self, causal: bool, gradients: bool) -> list[Tensor]:
        for quantize, x in self.numbers.items():
            stands_for = copy.copy(self)
            stands_for.q, stands_for.k, stands_for.v = x.dequantized()
            self.of_numbers[quantize] = Workload.exact(stands_for, causal, gradients=False)
        return super().exact(causal, gradients)

    def wanted(self, provider: Provider, exact: list[Tensor]) -> list[Tensor]:
        if not isinstance(provider, QuantizedProvider):
            return exact
        unit = provider.unit(self.numbers[provider.quantize])
        return [x * unit for x in self.of_numbers[provider.quantize]]

    def bare(self, provider: Provider, causal: bool) -> Callable[[], Tensor]:
        if not isinstance(provider, QuantizedProvider):
            return super().bare(provider, causal)
        return provider.prepare(self.numbers[provider.quantize], causal)
