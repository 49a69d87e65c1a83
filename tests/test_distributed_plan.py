"""What can be said of a split sequence without any process: shardings, plans, choices, agreement.

Would catch a pair of query and key that no call or two calls compute, a window that is off by a
row at a chunk's end, a document that sees another, a sink that enters twice, a row that no rank
has, and a cost model that prefers more bytes.
"""

from __future__ import annotations

import inspect
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_testing import dense_mask

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import cost, functional, local, methods, plan
from flash_ext.integrations.distributed.algorithms import Gather, Ulysses, _Results
from flash_ext.integrations.distributed.packing import Call, Mask
from flash_ext.integrations.distributed.request import ERROR, disagreement
from flash_ext.integrations.distributed.sharding import LAYOUTS, edges
from flash_ext.integrations.distributed.transport import Pending, join, split

DOCUMENTS = (None, (0, 3, 3, 20, 29, 30), (0, 1, 2, 40), (0, 17), (0, 5, 31))
SIDES = ((None, None), (None, 0), (3, 0), (0, 0), (2, 5), (None, 4), (7, None), (100, 100))


def visible(rows: int, mask: Mask) -> torch.Tensor:
    """What the whole sequence's queries see, written from the contract."""
    window = tuple(-1 if side is None else side for side in (mask.left, mask.right))
    whole = dense_mask(rows, rows, False, window)
    if mask.documents is None:
        return whole
    document = torch.full((rows,), -1)
    for number, (a, b) in enumerate(itertools.pairwise(mask.documents)):
        document[a:b] = number
    return whole & (document[:, None] == document) & (document >= 0)[:, None]


def computed(call: Call) -> torch.Tensor:
    """The pairs that the op computes: (rows of q, rows of k) of the call, 0 or 1."""
    shape = call.q[1] - call.q[0], call.k[1] - call.k[0]
    if call.batch_step is not None:
        found = torch.zeros(shape, dtype=torch.int32)
        half = shape[0] // 2
        for i, used in enumerate(call.used):
            keys = slice(i * call.batch_step, i * call.batch_step + used)
            found[i * half : (i + 1) * half, keys] = dense_mask(half, used, False, call.window)
        return found
    if call.packed is None:
        return dense_mask(*shape, False, call.window).int()
    found = torch.zeros(shape, dtype=torch.int32)
    of_q, of_k, used = offsets(call)
    bounds = zip(itertools.pairwise(of_q), itertools.pairwise(of_k), strict=True)
    for number, ((a, b), (c, d)) in enumerate(bounds):
        if used is not None:
            assert used[number] <= d - c
            d = c + used[number]
        found[a:b, c:d] += dense_mask(b - a, d - c, False, call.window).int()
    assert of_q[-1] == shape[0] and of_k[-1] == shape[1]
    return found


def offsets(call: Call) -> tuple[list[int], list[int], list[int] | None]:
    """cu_seqlens of q and k, and seqused_k, of a call of packed sequences."""
    options = call.packed.on(torch.device("cpu"))
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in options.values())
    used = options.get("seqused_k")
    of_q, of_k = (options[f"cu_seqlens_{name}"].tolist() for name in "qk")
    return of_q, of_k, None if used is None else used.tolist()


def check_plan(shards: cp.Sharding, mask: Mask) -> None:
    expected = visible(shards.rows, mask).int()
    by_gather, by_ring = torch.zeros_like(expected), torch.zeros_like(expected)
    by_batches = torch.zeros_like(expected)
    own = torch.zeros(shards.rows, dtype=torch.int32)
    own_ring = own.clone()
    everything = torch.arange(shards.rows)
    for rank in range(shards.ranks):
        q_rows = shards.positions(rank)
        met = torch.zeros(len(q_rows), dtype=torch.int32)
        for call in plan.gathered(shards, rank, mask):
            place(by_gather, call, q_rows, everything)
            own[q_rows[slice(*call.q)]] += call.own
            met[slice(*call.q)] += 1
        assert (met <= 1).all()
        for call in plan.as_batch(plan.gathered(shards, rank, mask)):
            place(by_batches, call, q_rows, everything)
        for t in range(plan.ring_steps(shards, mask)):
            source = (rank - t) % shards.ranks
            k_rows = shards.positions(source)
            for call in plan.ring(shards, rank, mask)[t]:
                place(by_ring, call, q_rows, k_rows)
                own_ring[q_rows[slice(*call.q)]] += call.own
                assert not (source != rank and call.own)
    assert torch.equal(by_gather, expected)
    assert torch.equal(by_batches, expected)
    assert torch.equal(by_ring, expected)
    in_document = expected.diagonal()
    assert torch.equal(own, in_document) and torch.equal(own_ring, in_document)


def place(total: torch.Tensor, call: Call, q_rows: torch.Tensor, k_rows: torch.Tensor) -> None:
    pairs = computed(call)
    assert pairs.any(), "a call that computes nothing"
    q_rows, k_rows = q_rows[slice(*call.q)], k_rows[slice(*call.k)]
    total[q_rows[:, None], k_rows] += pairs
    if not call.aligned:
        return
    if call.batch_step is not None:
        half = len(q_rows) // 2
        ends = [((i + 1) * half, i * call.batch_step + used)
                for i, used in enumerate(call.used)]  # fmt: skip
    elif call.packed is not None:
        of_q, of_k, used = offsets(call)
        used = used or [d - c for c, d in itertools.pairwise(of_k)]
        firsts = zip(of_q[1:], of_k, used, strict=False)
        ends = [(b, c + keys) for b, c, keys in firsts if keys > 0]
    else:
        ends = [(len(q_rows), len(k_rows))]
    for q_end, k_end in ends:
        assert q_rows[q_end - 1] == k_rows[k_end - 1]


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_visible_pair_is_computed_once(layout: str, ranks: int) -> None:
    """Each sequence with one half of the windows, of which other ranks' have the other half."""
    half = itertools.count(ranks + LAYOUTS.index(layout))
    for documents in DOCUMENTS:
        for rows in (documents[-1], documents[-1] + 3) if documents else (40, 37, 8, 3, 1, 0):
            if layout == "document_zigzag" and documents is None:
                continue
            shards = cp.sharding(rows, ranks, layout, documents)
            for left, right in SIDES[next(half) % 2 :: 2]:
                check_plan(shards, Mask(left, right, documents))


def test_at_two_levels() -> None:
    for layout, inner in itertools.product(("zigzag", "contiguous"), (1, 2, 3)):
        nested = cp.sharding(37, 2, layout).nested(inner)
        assert nested.ranks == 2 * inner
        every = torch.cat([nested.positions(r) for r in range(nested.ranks)])
        assert every.sort().values.tolist() == list(range(37))
        assert nested.outer is cp.sharding(37, 2, layout)
        check_plan(nested, Mask(None, 0))


def test_random_plans() -> None:
    draw = random.Random(0)
    for _ in range(150):
        lengths = [draw.choice((0, 1, 2, 5, 9, 14)) for _ in range(draw.randint(1, 6))]
        documents = (0, *itertools.accumulate(lengths))
        left, right = (draw.choice((None, 0, 1, 4, 11)) for _ in range(2))
        shards = cp.sharding(
            documents[-1] + draw.choice((0, 0, 4)), draw.randint(1, 5), draw.choice(LAYOUTS),
            documents,
        )  # fmt: skip
        check_plan(shards, Mask(left, right, draw.choice((documents, documents, None))))


def test_zigzag_steps_are_two_halves() -> None:
    """A ring's step is one call: the first half of an earlier rank's keys, or a later one's for
    the second half of the queries; its own rows are one causal call."""
    shards, mask = cp.sharding(64, 4), Mask(None, 0)
    assert plan.step(shards, 2, 1, mask) == (Call((0, 16), (0, 8), aligned=False),)
    assert plan.step(shards, 1, 2, mask) == (Call((8, 16), (0, 16), aligned=False),)
    assert plan.step(shards, 1, 1, mask) == (
        Call((0, 16), (0, 16), (-1, 0), own=True, aligned=False),
    )
    assert len(plan.gathered(shards, 1, mask)) == 2


def test_results_of_a_ring_are_rounded_once() -> None:
    """Also of more steps than are kept at a time; of some of the queries, and of none."""
    torch.manual_seed(0)
    for count in (0, 1, 2, 4, 5, 9, 11):
        found = _Results(torch.Size((1, 6, 2)), torch.empty(1, 0, 2, 16, dtype=torch.bfloat16))
        out, whole = torch.zeros(1, 6, 2, 16), torch.full((1, 2, 6), -torch.inf)
        for number in range(count):
            first = number % 3
            part = torch.randn(1, 6 - first, 2, 16, dtype=torch.bfloat16)
            lse = torch.randn(1, 2, 6 - first)
            found.add(part, lse, first)
            here, here_lse = out[:, first:], whole[..., first:]
            parts, lse_parts = [here, part], [here_lse, lse]
            torch.ops.flash_ext.combine_parts(here, here_lse, parts, lse_parts, [0, 0])
        result, result_lse = found.found()
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result_lse, whole, rtol=1e-6, atol=1e-6)
        different = result != out.bfloat16()  # of sums in another order
        assert different.float().mean() < 0.02
        torch.testing.assert_close(result.float(), out, rtol=2**-8, atol=1e-6)


def test_two_chunks_are_one_batch() -> None:
    """Both chunks of a zigzag are one call, whose keys are views of the same ones."""
    shards = cp.sharding(64, 4)
    for mask in (Mask(None, 0), Mask(12, 0), Mask(4, 0)):
        for rank in range(3):  # the last one's chunks are next to each other
            (call,) = plan.as_batch(plan.gathered(shards, rank, mask))
            assert call.batch_step is not None and call.own and call.aligned
    call = plan.as_batch(plan.gathered(shards, 1, Mask(None, 0)))[0]
    assert (call.used, call.batch_step, call.window) == ((16, 56), 0, (-1, 0))
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (16, 64, 64))
    slopes = torch.rand(1, 2, dtype=torch.float64)
    for options in ({}, {"alibi_slopes": slopes}, {"alibi_slopes": slopes[0]}):
        out, lse = local.forward(call, q, k, v, options)
        for single in plan.gathered(shards, 1, Mask(None, 0)):
            out_part, lse_part = local.forward(single, q, k, v, options)
            torch.testing.assert_close(out[:, slice(*single.q)], out_part)
            torch.testing.assert_close(lse[..., slice(*single.q)], lse_part)
    documents = Mask(None, 0, (0, 30, 64))
    calls = plan.gathered(shards, 1, documents)
    assert plan.as_batch(calls) == calls


def test_many_documents_are_few_calls() -> None:
    documents = tuple(range(0, 1001, 10))
    for layout in ("zigzag", "document_zigzag"):
        shards, mask = cp.sharding(1000, 4, layout, documents), Mask(None, 0, documents)
        assert len(plan.gathered(shards, 1, mask)) == 1 + (layout == "document_zigzag")
        assert max(len(plan.step(shards, 1, s, mask)) for s in range(4)) <= 4


def test_a_short_window_needs_one_neighbour() -> None:
    assert plan.ring_steps(cp.sharding(64, 4, "contiguous"), Mask(8, 0)) == 2
    assert plan.ring_steps(cp.sharding(64, 4, "contiguous"), Mask(None, 0)) == 4


@pytest.mark.parametrize("rows", [0, 1, 7, 16, 37])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_hold_every_row_once(rows: int, ranks: int) -> None:
    x = torch.arange(rows * 2).view(rows, 2)
    for layout in ("zigzag", "contiguous"):
        shards = cp.sharding(rows, ranks, layout)
        parts = split(shards, x)
        for rank in range(ranks):
            mine = shards.of_rank(x, rank, 0)
            assert torch.equal(mine[:, 0] // 2, shards.positions(rank))
            assert torch.equal(parts[rank, : len(mine)], mine)
        assert torch.equal(join(shards, parts), x)


def test_contiguous_is_as_torch_cuts() -> None:
    for rows, ranks in itertools.product((1, 5, 8, 13), (1, 2, 3, 4)):
        lengths = [len(part) for part in torch.arange(rows).chunk(ranks)]
        lengths += [0] * (ranks - len(lengths))
        assert cp.sharding(rows, ranks, "contiguous").lengths == tuple(lengths)


def test_zigzag_is_balanced() -> None:
    """Under a causal mask, the pairs of each rank, where the length divides and where not."""
    for rows, bound in ((4096, 1.0), (4099, 1.01)):
        shards = cp.sharding(rows, 4)
        pairs = [int((shards.positions(rank) + 1).sum()) for rank in range(4)]
        assert max(pairs) / (sum(pairs) / 4) <= bound
    assert edges(10, 4, equal=True) == [0, 2, 5, 7, 10]
    assert edges(10, 4, equal=False) == [0, 3, 6, 9, 10]


def test_typed_options_are_the_arguments() -> None:
    options = set(functional.ContextOptions.__annotations__)
    named = set(inspect.signature(cp.attention).parameters)
    assert named == options | {"q", "k", "v", "return_lse"}


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="layout must be 'zigzag' or"):
        cp.sharding(8, 2, "stripes")
    with pytest.raises(ValueError, match="cu_seqlens must be given"):
        cp.sharding(8, 2, "document_zigzag")


def test_orders_are_of_all_ranks() -> None:
    packed = cp.sharding(37, 2, "document_zigzag", (0, 1, 9, 9, 37))
    for shards in (cp.sharding(29, 3), packed, packed.nested(2)):
        rows, places = shards.orders(torch.device("cpu"))
        expected = torch.cat([shards.positions(rank) for rank in range(shards.ranks)]).tolist()
        assert rows.tolist() == expected
        assert [expected[place] for place in places] == list(range(shards.rows))
        lined_up = cp.Sharding.of_spans(shards.rows, shards.one_by_one)
        assert lined_up.lengths == shards.lengths and lined_up.in_order
        assert cp.Sharding.of_spans(shards.rows, shards.spans).spans == shards.spans
        same = cp.Sharding(shards.rows, shards.parts.clone(), shards.lengths)
        assert same == shards and hash(same) == hash(shards)
        assert same != cp.Sharding.of_spans(shards.rows, shards.spans[::-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_visible_pairs_are_counted(layout: str) -> None:
    for (left, right), documents in itertools.product(SIDES, DOCUMENTS):
        rows = documents[-1] + 2 if documents else 40
        shards = cp.sharding(rows, 3, layout, documents or (0, rows))
        mask = Mask(left, right, documents)
        exact = [int(visible(rows, mask)[shards.positions(rank)].sum()) for rank in range(3)]
        assert plan.share(rows, mask) == sum(exact) / rows**2
        assert plan.visible_pairs(shards, mask) == exact
        work = methods.work(shards, mask)
        assert work["share"] == pytest.approx(sum(exact) / rows**2)
        assert work["balance"] == pytest.approx(3 * max(exact) / sum(exact))


def llama(rows: int, ranks: int, **more: object) -> cost.Call:
    sizes = {"heads_q": 32, "heads_k": 8, "dim": 128, "dim_v": 128, "share": 0.5} | more
    return cost.Call(batch=1, rows=rows, ranks=ranks, **sizes)


def test_costs_are_plausible() -> None:
    for method in cost.METHODS:
        long, short = (cost.estimate(method, llama(s, 4), cost.ONE_HOST) for s in (2**20, 2**15))
        assert long.kernels / long.total > short.kernels / short.total
        assert long.kernels / long.total > 0.97
        slow = cost.estimate(method, llama(2**15, 4), cost.MANY_HOSTS)
        assert slow.exposed > short.exposed
        alone = cost.estimate(method, llama(2**15, 1), cost.ONE_HOST)
        assert alone.exposed == alone.memory == 0
    # Many key heads are dear to gather; few query heads are cheap to exchange.
    many = llama(2**15, 8, heads_k=32)
    assert cost.choose(many, cost.MANY_HOSTS) == "ulysses"
    assert cost.choose(llama(2**20, 4), cost.ONE_HOST, ("ring",)) == "ring"


class Counting:
    """Rank 0 of so many, without the others: counts the bytes that it would receive from them, of
    q, k, v and out. (The cost model leaves out lse.)"""

    needs_sms, rank = True, 0

    def __init__(self, shards: cp.Sharding) -> None:
        self.shards, self.ranks, self.received = shards, shards.ranks, 0

    def _arrive(self, whole: torch.Tensor, mine: int) -> torch.Tensor:
        if whole.dim() == 4:
            self.received += (whole.numel() - mine) * whole.element_size()
        return whole

    def gather(self, tensors, pieces, what):  # type: ignore[no-untyped-def]
        def begin(i: int) -> Pending:
            of_piece = [x.split(pieces, 2)[i] for x in tensors]
            wholes = [
                self._arrive(x.new_zeros(x.shape[0], self.shards.rows, *x.shape[2:]), x.numel())
                for x in of_piece
            ]
            return Pending(what, [], lambda: tuple(wholes))

        return begin

    def to_heads(self, tensors, what):  # type: ignore[no-untyped-def]
        wholes = []
        for x in tensors:
            shape = (x.shape[0], self.shards.rows, x.shape[2] // self.ranks, *x.shape[3:])
            wholes.append(self._arrive(x.new_zeros(shape), x.numel() // self.ranks))
        return Pending(what, [], lambda: tuple(wholes))

    def to_rows(self, tensors, into, what):  # type: ignore[no-untyped-def]
        for x in into:
            self._arrive(x, x.numel() // self.ranks)
        return Pending(what, [], lambda: None)


@pytest.mark.parametrize("heads_k", [2, 8])
def test_ratios_are_those_of_the_bytes_that_travel(
    heads_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a method's kernels over that of what it asks of its transport, counted: how many
    heads are in a piece depends on nothing else."""
    ranks, rows, heads_q, dim, dim_v = 4, 256, 16, 8, 24
    shards, mask = cp.sharding(rows, ranks), Mask(None, 0)
    machine = cost.Machine(forward=3e9, link=7e6)
    q, k, v = (
        torch.zeros(2, shards.lengths[0], h, d)
        for h, d in ((heads_q, dim), (heads_k, dim), (heads_k, dim_v))
    )
    call = cost.Call(2, rows, heads_q, heads_k, dim, dim_v, ranks, 4, **methods.work(shards, mask))
    flops = 0

    def forward(call, q, k, v, options, into=None):  # type: ignore[no-untyped-def]
        nonlocal flops
        pairs = int(computed(call).sum())
        flops += 2 * pairs * q.shape[0] * q.shape[2] * (q.shape[3] + v.shape[3])
        out = q.new_zeros(q.shape[0], call.q[1] - call.q[0], q.shape[2], v.shape[3])
        return out, out[..., 0].mT

    monkeypatch.setattr(local, "forward", forward)
    monkeypatch.setattr(local, "forward_of_views", forward)
    gather = Gather(Counting(shards), plan.gathered(shards, 0, mask))
    whole = Gather(None, plan.gathered(cp.sharding(rows, 1), 0, mask))
    copies = max(1, ranks // heads_k)
    heads_each = heads_k * copies // ranks
    ulysses = Ulysses(Counting(shards), whole, copies, (heads_each,))
    for method, flow in ((gather, cost.gathering), (ulysses, cost.exchanging)):
        flops = 0
        method.forward(q, k, v, {})
        counted = flops / machine.forward / (method.transport.received / machine.link)
        assert flow(call, machine).ratio == pytest.approx(counted)


def test_machines() -> None:
    """By the hosts of a group, not by its size."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for hosts, engines, machine in (
        (1, False, cost.ONE_HOST),
        (2, False, cost.MANY_HOSTS),
        (9, False, cost.MANY_HOSTS),
        (1, True, cost.ENGINES),
    ):
        assert cost.machine_of(gpu, hosts, engines) == machine
        assert cost.machine_of(cpu, hosts, engines) == cost.CPU


def test_unequal_work_counts_where_ranks_keep_their_rows() -> None:
    """Documents in the zigzag of one sequence: the longest one's rows are those of few ranks. In
    their own zigzag a step of the ring has a kernel for every pair of chunks that meet.
    """
    rows, ranks = 2**17, 4
    documents = (0, rows // 2, *range(rows // 2 + 256, rows + 1, 256))
    mask = Mask(None, 0, documents)

    def facts(layout: str, mask: Mask) -> dict[str, Any]:
        shards = cp.sharding(rows, ranks, layout, documents)
        found = methods.work(shards, mask)
        return found | {"ring_kernels": methods.ring_kernels(shards, mask)}

    def choice(layout: str) -> str:
        return cost.choose(llama(rows, ranks, **facts(layout, mask)), cost.ENGINES)

    assert choice("zigzag") == "ulysses"
    assert choice("document_zigzag") == "all_gather"
    causal = Mask(None, 0)
    assert facts("contiguous", causal)["balance"] > 1.74
    zigzag = facts("zigzag", causal)
    assert zigzag["ring_kernels"] == ranks - 1
    assert cost.choose(llama(rows, ranks, **zigzag), cost.ENGINES) == "ring"


@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 13, 32])
def test_pieces_hold_every_head_once(heads: int, ratio: float) -> None:
    sizes = cost.pieces_of(heads, ratio)
    pieces = list(local.head_pieces(4 * heads, sizes))
    assert [h for _, k in pieces for h in range(heads)[k]] == list(range(heads))
    assert all((q.start, q.stop) == (4 * k.start, 4 * k.stop) for q, k in pieces)
    assert tuple(k.stop - k.start for _, k in pieces) == sizes and len(sizes) <= 8
    assert sizes[0] <= max(1, heads / 6) and sizes[-1] <= max(1, heads / 6)
    one_way = cost.pieces_of(heads, ratio, returns=False)
    assert sum(one_way) == heads and one_way[0] == sizes[0]
    if heads == 8:  # examples: the sizes are chosen, not derived
        assert one_way == {0.3: (1,) * 8, 1.0: (1,) * 8, 3.0: (1, 3, 4), 50.0: (1, 7)}[ratio]
    if heads == 8:  # what the kernels of a piece hide is the next piece
        assert sizes == {0.3: (1,) * 8, 1.0: (1,) * 8, 3.0: (1, 3, 3, 1), 50.0: (1, 6, 1)}[ratio]


def test_pieces_of_long_sequences() -> None:
    """Of one causal sequence, whose kernels take longer than the host: one head in the first piece,
    which nothing hides, and one in the last piece if gradients travel back."""
    for rows, ranks in itertools.product((2**15, 2**17, 2**20), (2, 4)):
        for machine in (cost.ENGINES, cost.ONE_HOST):
            call = llama(rows, ranks)
            assert cost.gathering(call, machine).pieces(8, returns=False) == (1, 7)
            assert cost.gathering(call, machine, True).pieces(8, returns=True) == (1, 6, 1)
            heads = 8 // ranks
            expected = {4: (1, 2, 1), 2: (1, 1)}[heads]
            assert cost.exchanging(call, machine).pieces(heads, returns=True) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_of_short_documents_are_few(ranks: int, layout: str) -> None:
    """A thousand documents of 131 tokens: their kernels have few FLOP, but a tile for each document
    and head, and the host must not be late with more pieces than that hides."""
    rows = 131_000
    documents = tuple(range(0, rows + 1, 131))
    shards, mask = cp.sharding(rows, ranks, layout, documents), Mask(None, 0, documents)
    call = llama(rows, ranks, **methods.work(shards, mask))
    assert cost.pieces_of(8, 0.3) == 8 * (1,)  # by their FLOP
    for backward in (False, True):
        flow = cost.gathering(call, cost.ENGINES, backward)
        pieces = flow.pieces(8, backward)
        assert sum(pieces) == 8 and len(pieces) <= 4

        def seconds(pieces: tuple[int, ...], flow: cost.Flow = flow) -> float:
            return max(flow.kernels + flow.exposed(pieces), len(pieces) * flow.host)

        assert seconds(pieces) <= min(seconds((8,)), seconds(8 * (1,)))
    if layout == "document_zigzag" and ranks == 2:
        assert cost.gathering(call, cost.ENGINES).pieces(8, returns=False) == (1, 4, 3)


def test_times_of_short_documents() -> None:
    """A ring of two H200s took 17.2 ms for a step of a thousand documents in their own layout, and
    6.1 in the layout of one sequence; a model of FLOP alone had 8.7 and 4.4."""
    rows = 131_072
    documents = (0, *sorted(random.Random(0).sample(range(1, rows), 999)), rows)
    for layout, measured in (("document_zigzag", 17.2), ("zigzag", 6.1)):
        shards, mask = cp.sharding(rows, 2, layout, documents), Mask(None, 0, documents)
        facts = {"ring_kernels": methods.ring_kernels(shards, mask)} | methods.work(shards, mask)
        found = cost.estimate("ring", llama(rows, 2, **facts), cost.ENGINES).total
        assert measured / 1.4 < 1e3 * found < 1.4 * measured


def test_late_hosts_get_fewer_pieces() -> None:
    """Of a short sequence a piece's kernels end before the host has enqueued the next one."""
    call = llama(2048, 4)
    for backward in (False, True):
        assert cost.gathering(call, cost.ENGINES, backward).pieces(8, backward) == (8,)
        quick = cost.gathering(call, replace(cost.ENGINES, host=1e-6), backward)
        assert len(quick.pieces(8, backward)) > 1
    both = cost.estimate("all_gather", call, cost.ENGINES)
    assert both.total == pytest.approx((1 + 2.5) * cost.ENGINES.host)


def test_disagreements_are_named() -> None:
    same = {"dtype": "float32", "causal": True}
    assert disagreement([same, dict(same)]) is None
    said = disagreement([same, same | {"causal": False}])
    assert said is not None and "causal is True on rank 0, False on rank 1" in said
    assert "dtype" not in said
    said = disagreement([same, {ERROR: "q must be …"}, same])
    assert said == "q must be … (on rank 1 of the group)"
