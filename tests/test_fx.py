"""`torch.fx.symbolic_trace`: a call of attention is one node, whatever its options are.

Would catch an option that is prepared by a tensor's shape or dtype, which a proxy does not have,
and a graph that cannot be copied, or computes something else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import flash_ext

Tensor = torch.Tensor


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 6, 4, 16, dtype=torch.float16) for _ in range(3)]


OPTIONS: dict[str, Tensor] = {
    "bias": torch.randn(4, 6, 6, dtype=torch.float16),
    "alibi_slopes": torch.rand(4),
    "sink": torch.rand(4),
    "seqused_k": torch.tensor([3, 6], dtype=torch.int32),
    "scale": torch.tensor(0.3),
    "softcap": torch.tensor(2.0),
    "window": torch.tensor([2, 1]),
}


def assert_traced(function: Callable, *arguments: Tensor) -> None:
    graph = torch.fx.symbolic_trace(function)
    targets = [x.target for x in graph.graph.nodes if x.op == "call_function"]
    assert sum(x.__module__.startswith("flash_ext") for x in targets) == 1
    for x in (graph, copy.deepcopy(graph)):
        torch.testing.assert_close(x(*arguments), function(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_in_a_tensor(name: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return 2 * flash_ext.attention(q, k, v, **{name: x})

    assert_traced(call, *inputs(), OPTIONS[name])


@pytest.mark.parametrize("name", ("attention", "fp8.attention"))
def test_both_results(name: str) -> None:
    attention = flash_ext.attention if name == "attention" else flash_ext.fp8.attention
    more = {"softcap": 5.0} if name == "attention" else {"scale": 0.3}

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, causal=True, window=(3, 0), return_lse=True, **more)
        return 2 * out, lse.exp()

    assert_traced(call, *inputs())


@pytest.mark.parametrize("name", ("attention_varlen", "fp8.attention_varlen"))
def test_packed_sequences(name: str) -> None:
    in_fp8 = name.startswith("fp8")
    attend = flash_ext.fp8.attention_varlen if in_fp8 else flash_ext.attention_varlen
    option = "sink" if in_fp8 else "alibi_slopes"

    def call(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, of_heads: Tensor) -> Tensor:
        return attend(q, k, v, offsets, offsets, **{option: of_heads})

    packed = [x.flatten(0, 1) for x in inputs()]
    assert_traced(call, *packed, torch.tensor([0, 5, 12], dtype=torch.int32), torch.rand(4))


def test_a_module_with_a_learned_bias() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(4, 6, 6, dtype=torch.float16))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_ext.attention(q, k, v, bias=self.bias)

    block = Block()
    graph = torch.fx.symbolic_trace(block)
    graph(*inputs()).float().square().sum().backward()
    found = graph.get_parameter("bias").grad
    block.bias.grad = None
    block(*inputs()).float().square().sum().backward()
    assert found is not None and torch.equal(found, block.bias.grad)


def test_a_proxy_elsewhere_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="bias must be a tensor, got a value of type Proxy"):
        torch.fx.symbolic_trace(lambda bias: flash_ext.attention(q, k, v, bias=bias))
