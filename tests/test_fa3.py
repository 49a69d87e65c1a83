"""What is particular to fa3: what it leaves to others, and the bugs to fear in its kernel.

Would catch a call that fa3 refuses without need, or takes although it cannot; a maximum that the
optimistic softmax misses; keys of another sequence, or keys out of use, that TMA loads; tiles that
the persistent grid loses, also in the replays of a CUDA graph.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_testing import (
    FA3_REFUSES,
    Problem,
    attend,
    check,
    make_inputs,
    options_of,
)

import flash_ext

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]


def test_the_cpu_has_no_fa3() -> None:
    q = torch.randn(1, 8, 2, 64)
    with pytest.raises(ValueError, match="variant must be 'auto', 'fa1' or 'fa2' on the CPU"):
        flash_ext.attention(q, q, q, variant="fa3")
    explanation = flash_ext.explain(q, q, q)
    assert explanation.variant == "fa2" and "Hopper" in (explanation.reasons["fa3"] or "")


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize(
        "change",
        (
            {},
            {"head_dim": 8},
            {"head_dim": 40, "head_dim_v": 16},
            {"head_dim": 96},
            {"head_dim": 192, "head_dim_v": 128},
            {"head_dim": 200},
            {"head_dim": 256},
            {"dtype": torch.float16},
            {"causal": True},
            {"window": (17, 3)},
            {"softcap": 3.0},
            {"alibi": "bh"},
            {"sink": True},
            {"scale": -0.3},
            {"heads_q": 6},
            {"seqused_k": (5, 60)},
            {"lengths_q": (40, 0, 90), "lengths_k": (90, 3, 0)},
            {"layout": "bhsd"},
            {"layout": "sbhd"},
            {"layout": "packed"},
            {"layout": "expanded_heads"},
            {"layout": "expanded_batch"},
            {"seqlen_q": 1, "seqlen_k": 1},
        ),
        ids=str,
    )
    def test_what_it_takes(self, change: dict) -> None:
        problem = dataclasses.replace(Problem(seqlen_q=70, seqlen_k=130), **change)
        check(problem.well_conditioned(), "fa3", "cuda")
        inputs = make_inputs(problem, "cuda")
        options = options_of(problem) | inputs.options()
        if problem.packed:
            options |= {f"cu_seqlens_{x}": getattr(inputs, f"cu_seqlens_{x}") for x in "qk"}
        assert flash_ext.explain(inputs.q, inputs.k, inputs.v, **options).variant == "fa3"

    @pytest.mark.parametrize(
        ("change", "reason"),
        (
            ({"dropout_p": 0.1}, "has no dropout"),
            ({"bias": "11qk"}, "has no bias"),
            ({"head_dim": 60}, "needs rows of q that start and end on 16-byte boundaries"),
            ({"head_dim_v": 60}, "needs rows of v that start and end on 16-byte boundaries"),
            ({"layout": "odd_row"}, "needs rows of q that start and end on 16-byte boundaries"),
            ({"layout": "odd_offset"}, "needs rows of q that start and end on 16-byte boundaries"),
        ),
        ids=str,
    )
    def test_what_it_leaves_to_others(self, change: dict, reason: str) -> None:
        problem = dataclasses.replace(Problem(), **change)
        inputs = make_inputs(problem, "cuda")
        with pytest.raises(RuntimeError, match=reason) as error:
            attend(problem, inputs, variant="fa3")
        assert FA3_REFUSES.search(str(error.value))
        check(problem, "auto", "cuda")
        options = options_of(problem) | inputs.options()
        explanation = flash_ext.explain(inputs.q, inputs.k, inputs.v, **options)
        assert explanation.variant == "fa2" and reason in explanation.reasons["fa3"]

    def test_rows_on_top_of_each_other_are_left_to_others(self) -> None:
        q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, 1, 2, 64, device="cuda", dtype=torch.bfloat16).expand(1, 64, 2, 64)
        with pytest.raises(RuntimeError, match="needs rows of k that do not overlap"):
            flash_ext.attention(q, k, k, variant="fa3")
        assert flash_ext.explain(q, k, k).variant == "fa2"

    @pytest.mark.parametrize("head_dim", (64, 128, 256))
    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
    @pytest.mark.parametrize("towards", ("first", "last"))
    @pytest.mark.parametrize("gain", (3.0, 30.0, 300.0))
    def test_maxima_that_grow_from_tile_to_tile(
        self, gain: float, towards: str, dtype: torch.dtype, head_dim: int
    ) -> None:
        """By more than 12, and more than 128, powers of two, where a first look is not enough."""
        problem = Problem(1, 200, 700, 2, 2, head_dim, dtype=dtype, causal=True)
        inputs = make_inputs(problem, "cuda")
        ramp = torch.linspace(0, gain, 700, device="cuda").view(1, -1, 1, 1)
        ramp = ramp if towards == "last" else ramp.flip(1)
        with torch.no_grad():
            inputs.k.copy_((inputs.k.float() * ramp).to(dtype))
        check(problem, "fa3", "cuda", inputs=inputs)

    @pytest.mark.parametrize("head_dim", (64, 128, 256))
    def test_infinite_scores_are_nan_as_in_standard_attention(self, head_dim: int) -> None:
        q = torch.randn(1, 300, 1, head_dim, device="cuda", dtype=torch.float16)
        k, v = torch.randn_like(q), torch.randn_like(q)
        k[0, 20] = torch.inf
        out = flash_ext.attention(q.abs(), k, v, variant="fa3")
        assert out.isnan().all()

    @pytest.mark.parametrize("head_dim", (64, 128, 256))
    def test_a_neighbour_of_nans(self, head_dim: int) -> None:
        problem = Problem(
            head_dim=head_dim, lengths_q=(100, 70, 130), lengths_k=(70, 200, 90), causal=True
        )
        inputs = make_inputs(problem, "cuda")
        before = attend(problem, inputs, variant="fa3", return_lse=True)[0].detach().clone()
        with torch.no_grad():
            inputs.k[70:270] = torch.nan
            inputs.v[70:270] = torch.nan
        after = attend(problem, inputs, variant="fa3", return_lse=True)[0].detach()
        others = torch.ones(len(after), dtype=torch.bool)
        others[100:170] = False
        assert torch.equal(before[others], after[others])
        assert after[100:170].isnan().any()

    @pytest.mark.parametrize(
        "problem",
        (
            Problem(50, 70, 90, 20, 10, 64, causal=True, loss="out"),
            Problem(40, 300, 300, 16, 16, 128, causal=True, loss="out"),
            Problem(9, 130, 257, 20, 5, 256, loss="out"),
            Problem(1, 4224, 4224, 5, 5, 64, causal=True, loss="out"),
        ),
        ids=str,
    )
    def test_many_more_tiles_than_the_gpu_has_room_for(self, problem: Problem) -> None:
        check(problem, "fa3", "cuda")

    @pytest.mark.parametrize("tiles", (1, 132, 133, 700))
    def test_every_replay_of_a_graph_does_all_tiles(self, tiles: int) -> None:
        q, k, v = (
            torch.randn(tiles, 100, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        expected = flash_ext.attention(q, k, v, causal=True, variant="fa3")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_ext.attention(q, k, v, causal=True, variant="fa3")
        for _ in range(5):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)

    def test_a_thousand_runs_have_the_same_bits(self) -> None:
        problem = Problem(3, 333, 700, 8, 2, 128, causal=True)
        inputs = make_inputs(problem, "cuda")
        results = [
            torch.cat(
                [
                    x.detach().flatten().float()
                    for x in attend(problem, inputs, variant="fa3", return_lse=True)
                ]
            )
            for _ in range(1000)
        ]
        assert all(torch.equal(x, results[0]) for x in results)
