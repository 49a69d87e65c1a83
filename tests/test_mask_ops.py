"""Masks of lists of blocks: the ops that accept them, on the CPU, against dense masks.

Would catch a block or a bit that is read from the wrong place, a read of an entry that the format
leaves unused, a gradient that a mask loses, and tensors of a mask that autograd, vmap or a compiler
drops.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from attention_testing import nan_filled_outputs
from compiled import load_host_side
from mask_model import bits_of, blocks_of, decode, kinds_of_rows, mask_of, rows_of
from torch import Tensor
from torch.utils._pytree import tree_map

from flash_ext.cpu.tile_mask import dense_mask, kinds_of_runs

fwd, bwd = torch.ops.flash_ext.fwd, torch.ops.flash_ext.bwd
NAMES = ("mask_kv_tiles", "mask_q_tiles", "mask_words")


def random_mask(*sizes: int, seed: int = 0) -> Tensor:
    """With blocks of each kind, empty rows, and edges within blocks."""
    make = torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q, seqlen_k = sizes
    blocks = (batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128))
    kinds = torch.randint(3, blocks, generator=make)
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q, :seqlen_k]
    mask = (kinds == 1) | ((kinds == 2) & (torch.rand(sizes, generator=make) < 0.5))
    mask[:, :, 1:3] = False
    return mask


def operands(*, batch: int = 2, heads: int = 4, heads_k: int = 2, rows: int = 200) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((rows, heads), (300, heads_k), (300, heads_k))
    return [torch.randn(batch, *x, 16, dtype=torch.float64) for x in shapes]


def test_the_model_agrees_with_itself() -> None:
    mask = random_mask(1, 2, 150, 200)
    given = mask_of(mask)
    assert torch.equal(decode(given["mask_kv_tiles"], given["mask_words"], 150, 200), mask)


@pytest.mark.parametrize(
    "sizes", ((1, 1, 1, 1), (2, 1, 128, 256), (1, 3, 300, 700), (1, 1, 130, 0))
)
def test_dense_masks(sizes: tuple[int, ...]) -> None:
    mask = random_mask(*sizes)
    given = mask_of(mask)
    assert torch.equal(dense_mask(given["mask_kv_tiles"], given["mask_words"], sizes[2:]), mask)


def test_intervals_apply_in_partial_blocks_alone() -> None:
    words = torch.zeros(1, 1, 128, 4, dtype=torch.int32)
    words[..., :5, :] = torch.tensor([3, 140, 250, 384], dtype=torch.int32)
    kv_tiles = rows_of(torch.tensor([[[[0, 2, 1]]]]), 6)[..., :8].contiguous()
    want = decode(kv_tiles, words, 5, 390)
    assert want[..., 128:140].all() and want[..., 250:384].all() and not want[..., 140:250].any()
    assert torch.equal(dense_mask(kv_tiles, words, (5, 390)), want)


def test_runs_of_many_blocks() -> None:
    """The upper half of the count is in the sign of an int32."""
    row = torch.tensor([[40000, 0, 1, 0, 2 | (40000 - 2**16) << 16, 7, 7, 7]], dtype=torch.int32)
    kinds = kinds_of_runs(row, 40005)[0]
    assert kinds[2:40002].eq(1).all() and kinds.sum() == 40000


BIASES: dict[str, Any] = {
    "none": lambda: None,
    "float": lambda: torch.randn(1, 4, 200, 1, dtype=torch.float64, requires_grad=True),
    "bool": lambda: torch.rand(2, 1, 1, 300) < 0.7,
}


@pytest.mark.parametrize("variant", ("fa1", "auto"))
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("sizes", ((2, 4), (1, 1)))
def test_attention_and_gradients(sizes: tuple[int, int], bias: str, variant: str) -> None:
    """As with the mask as a bias, with the same bits (a bias's gradient is summed elsewhere)."""
    mask = random_mask(*sizes, 200, 300)
    added = BIASES[bias]()
    as_bias = mask if added is None else mask & added if bias == "bool" else None
    if as_bias is None:
        as_bias = added.masked_fill(~mask, -torch.inf)
    results = []
    for options in ({"bias": added, **mask_of(mask)}, {"bias": as_bias}):
        given = [x.requires_grad_() for x in operands()]
        out, lse = fwd(*given, **options, softcap=2.0, variant=variant)
        wanted = [*given, *([added] if bias == "float" else [])]
        loss = out.sin().sum() + lse[lse > -torch.inf].sum()
        results.append((out, lse, *torch.autograd.grad(loss, wanted)))
    for found, want in zip(*(x[:5] for x in results), strict=True):
        assert torch.equal(found, want)
    for found, want in zip(*(x[5:] for x in results), strict=True):
        torch.testing.assert_close(found, want)
    out, lse = results[0][:2]
    assert (lse[:, :, 1:3] == -torch.inf).all() and not out[:, 1:3].any()


def test_autograd_vmap_and_compilers_pass_the_mask() -> None:
    given = [x.requires_grad_() for x in operands(rows=130)]
    mask = mask_of(random_mask(1, 4, 130, 300))
    torch.library.opcheck(fwd.default, tuple(given), mask)
    out, lse = (x.detach() for x in fwd(*given, **mask))
    q, k, v = (x.detach() for x in given)
    torch.library.opcheck(bwd.default, (out, lse, q, k, v, out, lse), mask)


@pytest.mark.parametrize("mapped", (False, True))
def test_vmap(mapped: bool) -> None:
    q, k, v = (torch.stack((x, 2 * x), 1) for x in operands(rows=130))
    masks = [mask_of(random_mask(1, 4, 130, 300, seed=seed)) for seed in (0, int(mapped))]
    dims = {name: 3 for name in NAMES} if mapped else None
    every = {n: torch.stack([m[n] for m in masks], 3) if mapped else masks[0][n] for n in NAMES}
    found, _ = torch.vmap(lambda q, k, v, m: fwd(q, k, v, **m), (1, 1, 1, dims))(q, k, v, every)
    for i, mask in enumerate(masks):
        assert torch.equal(found[i], fwd(q[:, i], k[:, i], v[:, i], **mask)[0])


def test_results_are_written_into_tensors() -> None:
    q, k, v = (x.to(torch.bfloat16) for x in operands(rows=130))
    mask = mask_of(random_mask(2, 1, 130, 300))
    out, lse = fwd(q, k, v, **mask)
    into = torch.empty_like(out)
    assert torch.equal(torch.ops.flash_ext.fwd_into(into, q, k, v, **mask), lse)
    assert torch.equal(into, out)


def test_8_bit_inputs_have_no_mask() -> None:
    x = torch.randn(1, 128, 1, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="variant 'fa3' has no mask with 8-bit inputs"):
        fwd(x, x, x, **mask_of(torch.ones(1, 1, 128, 128, dtype=torch.bool)))


# --- The ops that make masks ---

ops = torch.ops.flash_ext
Lists = tuple[Tensor, Tensor, Tensor]


def random_intervals(*sizes: int, seqlen_k: int, seed: int = 0) -> Tensor:
    """Most of them grow with the query, so that blocks are full; some are empty, cross, touch or
    lie outside."""
    make = torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q = sizes
    shape = (batch, heads, seqlen_q, 4)
    if seed % 4 == 0:
        return torch.randint(-50, seqlen_k + 50, shape, generator=make, dtype=torch.int32)
    i = torch.arange(seqlen_q)[:, None] * seqlen_k // max(seqlen_q, 1)
    jitter = torch.randint(100, shape, generator=make) * (seed % 4 == 2)
    width, first = (int(torch.randint(1, seqlen_k + 2, (), generator=make)) for _ in "ab")
    columns = (torch.zeros_like(i), i * 0 + first, i - width, i + 1)
    return (torch.cat(columns, -1) + jitter).to(torch.int32).contiguous()


def random_documents(seed: int, most: int = 20000) -> tuple[Tensor, int, int, dict[str, Any]]:
    """Arguments of mask_from_documents, of at most so many tokens: of ids, offsets, or neither."""
    make = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=make, dtype=torch.int32)

    rows = (1, 130, 700, most)[seed // 3 % 4]
    count = int(draw(1, 9))
    options: dict[str, Any] = {
        "window_left": (-1, 40, 3000)[int(draw(0, 3))],
        "window_right": (-1, 0, 50)[int(draw(0, 3))],
        "first_keys_in_window": bool(draw(0, 2)),
    }
    first_keys, keys = draw(-2, 150, 1), rows
    if seed % 3 == 0:
        batch = 1 if rows == most else 2
        edges = draw(0, rows, batch, count)
        ids = (torch.arange(rows)[:, None] >= edges[:, None]).sum(-1) % 5 - 1
        options["ids"] = ids.int() if seed % 2 else ids.mT.contiguous().mT
    elif seed % 3 == 1:
        keys = int(draw(1, rows + 200))
        for name, length in (("q", rows), ("k", keys)):
            inner = draw(0, length + 1, count - 1).sort().values
            ends = torch.cat((ints_of(1), inner, inner.new_tensor([length - length // 9])))
            options[f"cu_seqlens_{name}"] = ends
        if seed % 2:
            first_keys = draw(-2, 150, count)
    else:
        keys = int(draw(0, rows + 200))
        first_keys = draw(-2, 150, 1 + seed % 2)
    return first_keys, rows, keys, options


def shown_by_documents(
    first_keys: Tensor,
    rows: int,
    keys: int,
    *,
    window_left: int,
    window_right: int,
    first_keys_in_window: bool,
    ids: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """bool (Bm, 1, rows, keys), document by document."""
    matrices: list[list[tuple[range, range]]] = [[(range(rows), range(keys))] for _ in first_keys]
    if ids is not None:
        matrices = []
        for of_row in ids.tolist():
            ends = [i for i in range(1, rows) if of_row[i] != of_row[i - 1]] + [rows]
            stretches = [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
            matrices.append([(x, x) for x in stretches if of_row[x[0]] >= 0])
    elif cu_seqlens_q is not None and cu_seqlens_k is not None:
        of_q, of_k = (
            [range(a, b) for a, b in itertools.pairwise(x.tolist())]
            for x in (cu_seqlens_q, cu_seqlens_k)
        )
        matrices = [list(zip(of_q, of_k, strict=True))]
    visible = torch.zeros(len(matrices), 1, rows, keys, dtype=torch.bool)
    for b, documents in enumerate(matrices):
        for d, (of_q, of_k) in enumerate(documents):
            i, j = torch.arange(len(of_q))[:, None], torch.arange(len(of_k))
            distance = j - i - (len(of_k) - len(of_q))
            left = distance >= -window_left if window_left >= 0 else distance == distance
            right = distance <= window_right if window_right >= 0 else distance == distance
            number = first_keys[0 if len(first_keys) == 1 else b if cu_seqlens_q is None else d]
            first = (j < number) & (right | (not first_keys_in_window))
            part = visible[b, 0, of_q.start : of_q.stop, of_k.start : of_k.stop]
            part.copy_((left & right) | first)
    return visible


def shown(intervals: Tensor, seqlen_k: int) -> Tensor:
    begin_0, end_0, begin_1, end_1 = intervals.unsqueeze(-1).unbind(-2)
    key = torch.arange(seqlen_k, device=intervals.device)
    return ((key >= begin_0) & (key < end_0)) | ((key >= begin_1) & (key < end_1))


def transposed(q_tiles: Tensor, blocks_q: int) -> Tensor:
    return kinds_of_rows(q_tiles, blocks_q).mT


def check_mask(made: Lists, want: Tensor, exact: bool) -> None:
    """What the lists and words of (nearly) any device say, against the dense mask.

    exact: q_tiles lists the blocks of kv_tiles, and no block is listed that shows nothing.
    """
    kv_tiles, q_tiles, words = (x.cpu() for x in made)
    want = want.cpu()
    seqlen_q, seqlen_k = want.shape[2:]
    kinds = kinds_of_rows(kv_tiles, blocks_of(seqlen_k))
    assert torch.equal(dense_mask(kv_tiles, words, (seqlen_q, seqlen_k)), want)
    of_keys = transposed(q_tiles, blocks_of(seqlen_q))
    exists, _ = bits_of(torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool))
    assert (of_keys[(kinds != 0)] != 0).all(), "a block that its keys do not list"
    full = of_keys == 1
    rows = rows_of(of_keys.to(torch.uint8))
    assert torch.equal(dense_mask(rows, words, (seqlen_q, seqlen_k)), want), "by q_tiles"
    assert not (full & (exists != 1)).any(), "a full block past the last key"
    if exact:
        assert torch.equal(kinds, of_keys) and torch.equal(kinds, bits_of(want)[0])


SIZES = (
    (1, 1, 1, 1),
    (2, 1, 128, 256),
    (1, 3, 300, 700),
    (1, 1, 130, 0),
    (1, 1, 0, 130),
    (0, 2, 5, 5),
)
EDGES = ((1, 1, 127, 129), (1, 1, 129, 4200), (1, 1, 4200, 15))


@pytest.mark.parametrize("sizes", SIZES + EDGES)
def test_a_dense_mask_becomes_lists(sizes: tuple[int, ...], device: str) -> None:
    mask = random_mask(*sizes).to(device)
    check_mask(ops.mask_from_dense(mask), mask, exact=True)


@pytest.mark.parametrize("case", ("keys", "queries", "heads", "transposed", "odd", "every second"))
def test_a_dense_mask_in_any_strides(case: str, device: str) -> None:
    mask = random_mask(1, 2, 300, 290).to(device)
    views = {
        "keys": mask[..., :1].expand(-1, -1, -1, 290),
        "queries": mask[:, :, 5:6].expand(-1, -1, 300, -1),
        "heads": mask[:, :1].expand(2, 3, -1, -1),
        "transposed": mask.mT,
        "odd": mask[:, :, 1:, 3:],
        "every second": mask[..., ::2],
    }
    check_mask(ops.mask_from_dense(views[case]), views[case], exact=True)


def test_bools_are_true_in_any_bit(device: str) -> None:
    octets = torch.randint(256, (1, 1, 130, 256), dtype=torch.uint8, device=device)
    octets[..., ::3] = 0
    check_mask(ops.mask_from_dense(octets.view(torch.bool)), octets != 0, exact=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sizes", ((1, 1, 1, 1), (2, 1, 300, 700), (1, 2, 1000, 300), (1, 1, 5, 0)))
def test_intervals_become_lists(sizes: tuple[int, ...], seed: int, device: str) -> None:
    *sizes, seqlen_k = sizes
    intervals = random_intervals(*sizes, seqlen_k=seqlen_k, seed=seed).to(device)
    made = ops.mask_from_intervals(intervals, seqlen_k)
    check_mask(made, shown(intervals, seqlen_k).expand(*made[0].shape[:2], -1, -1), exact=False)
    words = made[2]
    assert not words[:, :, intervals.shape[2] :].any(), "queries past the last one see nothing"
    begin_0, end_0, begin_1, end_1 = words.unbind(-1)
    assert ((end_1 == 0) | ((begin_0 < end_0) & (end_0 < begin_1) & (begin_1 < end_1))).all()
    assert ((end_0 == 0) | (begin_0 < end_0)).all() and (words <= seqlen_k).all()


@pytest.mark.parametrize("seed", range(36))
def test_documents_become_lists(seed: int, device: str) -> None:
    first_keys, *sizes, options = random_documents(seed, most=1500)
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    made = ops.mask_from_documents(first_keys.to(device), *sizes, **given)
    want = shown_by_documents(first_keys, *sizes, **options)
    check_mask(made, want.to(device), exact=False)


@pytest.mark.parametrize(
    ("columns", "blocks"),
    (  # of 1,024 queries and keys, 8 × 8 blocks
        (lambda i: (0 * i, i + 1, 0 * i, 0 * i), 36),  # causal
        (lambda i: (0 * i, 0 * i, i - 199, i + 1), 8 + 7 + 6),  # a window
        (lambda i: (0 * i, 0 * i + 64, i - 99, i + 1), 8 + 7 + 6),  # with first keys
        (lambda i: (i // 384 * 384, i // 384 * 384 + 384, 0 * i, 0 * i), 9 + 9 + 4),  # documents
        # A window, and the first queries see all.
        (lambda i: (0 * i, 0 * i, (i - 99) * (i > 63), i + 1 + 1024 * (i < 64)), 8 + 7 * 2),
    ),
)
def test_the_blocks_that_intervals_list(columns: Any, blocks: int, device: str) -> None:
    i = torch.arange(1024, device=device)
    intervals = torch.stack(columns(i), -1).to(torch.int32)[None, None]
    kv_tiles, q_tiles, _ = ops.mask_from_intervals(intervals, 1024)
    want = bits_of(shown(intervals, 1024).cpu())[0]
    assert torch.equal(kinds_of_rows(kv_tiles.cpu(), 8), want) and int((want != 0).sum()) == blocks
    assert torch.equal(transposed(q_tiles.cpu(), 8), want)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("broadcast", (False, True))
def test_blocks_cut_by_intervals(seed: int, broadcast: bool, device: str) -> None:
    batch, heads, seqlen_q, blocks_k = 2, 3, 390, 7
    sizes = (1, 1) if broadcast else (batch, heads)
    intervals = random_intervals(*sizes, seqlen_q, seqlen_k=800, seed=seed).clamp(0, 800)
    intervals = intervals.expand(*sizes, -1, -1).to(device)
    kinds = torch.randint(2, (batch, heads, 4, blocks_k), device=device, dtype=torch.uint8)
    made = ops.mask_from_blocks(kinds, intervals)
    visible = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q] != 0
    check_mask(made, visible & shown(intervals, blocks_k * 128), exact=False)
    listed = kinds_of_rows(made[0].cpu(), blocks_k)
    assert not listed[kinds.cpu() == 0].any()
    assert torch.equal(listed, transposed(made[1].cpu(), 4))


@pytest.mark.parametrize("sizes", ((1, 1), (7, 3), (40, 100), (3, 0), (0, 3), (64, 65)))
def test_kinds_become_lists(sizes: tuple[int, int], device: str) -> None:
    kinds = torch.randint(3, (2, 2, *sizes), device=device, dtype=torch.uint8)
    kinds[0, 0] = 1
    kinds[1, 1, sizes[0] // 2 :] = 2
    kv_tiles, q_tiles = ops.mask_from_kinds(kinds)
    assert torch.equal(kinds_of_rows(kv_tiles.cpu(), sizes[1]), kinds.cpu())
    assert torch.equal(transposed(q_tiles.cpu(), sizes[0]), kinds.cpu())
    if kinds.numel() > 0:
        assert kv_tiles[0, 0, 0, :5].tolist() == [sizes[1], 0, 1, 0, sizes[1] << 16]
    again = ops.mask_from_kinds(kinds.mT)
    assert torch.equal(kinds_of_rows(again[1].cpu(), sizes[1]), kinds.cpu())


MADE: dict[str, tuple[str, Any]] = {
    "dense": ("mask_from_dense", lambda: (random_mask(1, 2, 300, 500),)),
    "intervals": (
        "mask_from_intervals",
        lambda: (random_intervals(2, 1, 300, seqlen_k=500), 500),
    ),
    "blocks": (
        "mask_from_blocks",
        lambda: (
            torch.randint(2, (1, 2, 3, 4), dtype=torch.uint8),
            random_intervals(1, 1, 300, seqlen_k=500),
        ),
    ),
    "kinds": ("mask_from_kinds", lambda: (torch.randint(3, (1, 2, 3, 50), dtype=torch.uint8),)),
}


DOCUMENTS: dict[str, tuple[int, ...]] = {"ids": (3, 9), "offsets": (4, 7), "one document": (5,)}
MADE |= {
    f"{name} {seed}": ("mask_from_documents", functools.partial(random_documents, seed, most=40000))
    for name, seeds in DOCUMENTS.items()
    for seed in seeds
}


def used(rows: Tensor) -> list[list[int]]:
    """The entries of rows of runs that are read."""
    return [row[: 4 + row[2]] for row in rows.flatten(0, -2).tolist()]


def call_of(case: str, device: str = "cpu") -> tuple[Any, list[Any], dict[str, Any]]:
    """The op, its arguments and its options."""
    torch.manual_seed(0)  # the same for each device
    name, given = REFUSED[case][1:] if case in REFUSED else (MADE[case][0], MADE[case][1]())

    def there(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    if case not in HUGE:
        given = tree_map(there, given)
    elif device == "cuda":
        given = (torch.zeros(1, dtype=torch.bool, device=device).expand(given[0].shape),)
    options = given[-1] if isinstance(given[-1], dict) else {}
    return getattr(ops, name).default, list(given[: len(given) - bool(options)]), options


@pytest.mark.gpu
@pytest.mark.parametrize("case", MADE)
def test_devices_make_the_same_lists(case: str) -> None:
    op, given, options = call_of(case)
    expected = op(*given, **options)
    _, given, options = call_of(case, "cuda")
    with nan_filled_outputs():
        made = op(*given, **options)
    for found, want in zip(made[:2], expected[:2], strict=True):
        assert found.shape == want.shape and used(found) == used(want)
    if case not in ("dense", "kinds"):
        assert torch.equal(made[2].cpu(), expected[2])
    if case == "dense":
        partial = kinds_of_rows(expected[0], blocks_of(500)) == 2
        assert torch.equal(made[2].cpu()[partial], expected[2][partial])


@pytest.mark.gpu
@pytest.mark.parametrize("case", MADE)
def test_cuda_graphs_make_masks_of_new_contents(case: str) -> None:
    op, given, options = call_of(case, "cuda")
    op(*given, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = op(*given, **options)
    given[0].copy_(given[0] + 300 if given[0].dim() == 1 else given[0].flip(2))
    if "ids" in options:
        options["ids"].copy_(options["ids"].flip(1))
    graph.replay()
    for found, want in zip(made[:2], op(*given, **options)[:2], strict=True):
        assert used(found) == used(want)


@pytest.mark.gpu
def test_a_mask_of_many_tokens() -> None:
    """131,072 tokens of causal documents: linear memory, 1,024 blocks of each."""
    tokens, rows = 131072, torch.arange(131072, device="cuda")
    begin = rows // 5000 * 5000
    intervals = torch.stack((begin, rows + 1, rows * 0, rows * 0), -1).to(torch.int32)[None, None]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = torch.ops.flash_ext.mask_from_intervals(intervals, tokens)
    assert torch.cuda.max_memory_allocated() - before < 40 * tokens
    want = torch.ops.flash_ext.mask_from_intervals(intervals.cpu(), tokens)
    assert all(used(x) == used(y) for x, y in zip(made[:2], want[:2], strict=True))


@pytest.mark.parametrize("case", MADE)
def test_ops_that_make_masks_are_known_to_torch(case: str, device: str) -> None:
    op, given, options = call_of(case, device)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if device == "cpu":  # CUDA's kernels leave what nothing reads unwritten: no two runs are alike
        utils.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, tuple(given), options, test_utils=utils)


def ints_of(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


OCTETS = torch.uint8
OFFSETS = ints_of(3)
BOTH = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
OPTIONS = {
    **{"ids": None, "cu_seqlens_q": None, "cu_seqlens_k": None},
    **{"window_left": -1, "window_right": -1, "first_keys_in_window": False},
}


def of_documents(
    first_keys: int | Tensor = 1, *, seqlen_q: int = 5, seqlen_k: int = 5, **options: Any
) -> tuple[str, tuple[Any, ...]]:
    first_keys = ints_of(first_keys) if isinstance(first_keys, int) else first_keys
    return "mask_from_documents", (first_keys, seqlen_q, seqlen_k, OPTIONS | options)


HUGE = ("too many blocks", "too many pairs")
REFUSED: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "a mask of floats": ("mask", "mask_from_dense", (torch.zeros(1, 1, 2, 2),)),
    "a mask of bytes": ("mask", "mask_from_dense", (ints_of(1, 1, 2, 2, dtype=OCTETS),)),
    "three dimensions": ("mask", "mask_from_dense", (torch.zeros(1, 2, 2, dtype=torch.bool),)),
    "too many blocks": (
        "mask",
        "mask_from_dense",
        (torch.zeros(1, dtype=torch.bool).expand(1, 1, 1, 128 * 65535 + 1),),
    ),
    "too many pairs": (
        "mask",
        "mask_from_dense",
        (torch.zeros(1, dtype=torch.bool).expand(1, 1, 128 * 40000, 128 * 60000),),
    ),
    "long intervals": ("intervals", "mask_from_intervals", (ints_of(1, 1, 2, 4).long(), 5)),
    "one interval": ("intervals", "mask_from_intervals", (ints_of(1, 1, 2, 2), 5)),
    "intervals alone": ("intervals", "mask_from_intervals", (ints_of(2, 4), 5)),
    "less than no keys": ("seqlen_k", "mask_from_intervals", (ints_of(1, 1, 2, 4), -1)),
    "too many keys": ("intervals", "mask_from_intervals", (ints_of(1, 1, 2, 4), 2**31)),
    "bool kinds": ("kinds", "mask_from_kinds", (torch.zeros(1, 1, 2, 2, dtype=torch.bool),)),
    "kinds of a matrix": ("kinds", "mask_from_kinds", (ints_of(2, 2, dtype=OCTETS),)),
    "documents of another number": ("ids", *of_documents(ids=ints_of(1, 6))),
    "documents of a row": ("ids", *of_documents(ids=ints_of(5))),
    "octets as documents": ("ids", *of_documents(ids=ints_of(1, 5, dtype=OCTETS))),
    "documents and offsets": (
        "cu_seqlens_k",
        *of_documents(ids=ints_of(1, 5), cu_seqlens_k=OFFSETS),
    ),
    "documents of other keys": ("seqlen_k", *of_documents(ids=ints_of(1, 4), seqlen_q=4)),
    "first keys of documents": ("first_keys", *of_documents(2, ids=ints_of(1, 5))),
    "long first keys": ("first_keys", *of_documents(ints_of(1).long())),
    "a matrix of first keys": ("first_keys", *of_documents(ints_of(1, 1))),
    "first keys of other offsets": ("first_keys", *of_documents(3, **BOTH)),
    "offsets of keys alone": ("cu_seqlens_q", *of_documents(cu_seqlens_k=OFFSETS)),
    "offsets of queries alone": ("cu_seqlens_k", *of_documents(cu_seqlens_q=OFFSETS)),
    "more offsets of keys": ("cu_seqlens_k", *of_documents(**BOTH | {"cu_seqlens_k": ints_of(4)})),
    "no offsets": ("cu_seqlens_q", *of_documents(cu_seqlens_q=ints_of(0), cu_seqlens_k=ints_of(0))),
    "every second offset": (
        "cu_seqlens_k",
        *of_documents(**BOTH | {"cu_seqlens_k": ints_of(6)[::2]}),
    ),
    "long offsets": ("cu_seqlens_q", *of_documents(**BOTH | {"cu_seqlens_q": OFFSETS.long()})),
    "a negative number of queries": ("seqlen_q", *of_documents(seqlen_q=-1)),
    "too many documents' keys": ("the mask", *of_documents(seqlen_k=2**31)),
    "a left side of -2": ("window_left", *of_documents(window_left=-2)),
    "a right side of -2": ("window_right", *of_documents(window_right=-2)),
    "intervals of other blocks": (
        "intervals",
        "mask_from_blocks",
        (ints_of(1, 1, 2, 2, dtype=OCTETS), ints_of(1, 1, 128, 4)),
    ),
    "intervals of more heads": (
        "intervals",
        "mask_from_blocks",
        (ints_of(1, 1, 1, 2, dtype=OCTETS), ints_of(1, 2, 128, 4)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_inputs(case: str, device: str) -> None:
    op, given, options = call_of(case, device)
    error = rf"flash_ext: {REFUSED[case][0]} must be"
    with pytest.raises((ValueError, RuntimeError), match=error):
        op(*given, **options)


@pytest.mark.parametrize("case", [*REFUSED, *MADE])
def test_csrc_accepts_the_same(case: str) -> None:
    """csrc/api/accept_mask.h has the conditions."""
    load_host_side()
    op, given, options = call_of(case)
    name = op.name().removeprefix("flash_ext::")
    options = OPTIONS | options if options else {}
    why = getattr(ops, f"refusal_of_{name}")(*given, **options)
    assert getattr(ops, f"refused_{name}")(*given, **options) == why
    assert bool(why) == (case in REFUSED)
