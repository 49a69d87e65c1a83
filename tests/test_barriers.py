"""The barriers of the kernels, whose code runs on the host (tests/native/barriers.cpp).

Would catch, without a GPU and in whatever order threads may run: a deadlock, a stage that is
overwritten before all have read it, a read of what has not been written or has no fence, an arrival
or a wait in the wrong phase, bytes that TMA is not told to bring; and tables of barriers in the
kernels' headers that are not what the kernels do.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pytest
from barrier_model import Event, Moment, Noted, Run
from compiled import CSRC
from kernel_threads import KERNELS, SEQUENCES, Call, Kernel

FA3 = CSRC / "kernels" / "fa3"


def side_of(thread: int) -> str:
    """The producers are the first four warps, of which two threads each run."""
    return "producers" if thread < 8 else "consumers"


# --- The kernels ---


def varlen(queries: Sequence[int], keys: Sequence[int], **options: int) -> Call:
    """Packed sequences, with rows of no sequence after the last one."""
    offsets = [
        (ctypes.c_int * (SEQUENCES + 1))(*itertools.accumulate(lengths, initial=0))
        for lengths in (queries, keys)
    ]
    rows = {"seqlen_q": sum(queries) + 70, "seqlen_k": sum(keys) + 3}
    return Call(
        batch=len(queries), **rows, **options, varlen=1,
        cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1],
    )  # fmt: skip


CALLS = {
    "full": Call(3, 2, 1, 100, 150, -1, -1),
    "packed": varlen(
        (130, 0, 1, 65), (180, 50, 0, 64), heads_q=2, heads_k=2, window_left=150, deterministic=1
    ),
    "short": Call(10, 1, 1, 10, 20, -1, 0),
    "small": Call(2, 1, 1, 200, 144, -1, -1),
}
OPTIONS = {
    "splits": {"num_splits": 2, "seqlen_k": 1400},
    "packed GQA": {"num_splits": 2, "seqlen_k": 1400, "pack_gqa_log2": 3},
    "fixed splits": {"num_splits": 3, "seqlen_k": 4200, "split_ctas": 2},
    "merged splits": {"num_splits": 3, "seqlen_k": 4200, "split_ctas": 1},
    # Several KV tiles. In a short call teams of FA1 have no Q tile.
    **dict.fromkeys(("fa1", "fa2"), {"seqlen_k": 600}),
}
# The workspace for dS is of dense batches, and so are a bias and a mask of blocks. FA1's first CTA
# has the rows before the first sequence: none.
DENSE = ("stores dS", "dq_gemm", "decode", "bias", "mask", "fa1")

# At d 96 wgmma also reads what follows K, and nobody uses the result (Config::kTransposeDQ).
UNUSED = {"backward 96": re.compile(r"V: (Load of .* before Matmul|Matmul of .* before Load)")}


def run(name: str, call: str) -> Run:
    arguments = Call.from_buffer_copy(CALLS[call])
    arguments.num_splits = 1
    for option, values in OPTIONS.items():
        for key, value in values.items() if option in name else ():
            setattr(arguments, key, value)
    kernel = Kernel(name, arguments)
    return Run(kernel.events(), kernel.barriers, kernel.memory)


SOME = pytest.mark.share(1 / 3)
# Kernels whose headers have no table; with masks, lanes that have read words arrive one by one.
WITHOUT_TABLES = ("decode", "small tiles", "mask", "fa1", "fa2")


@pytest.mark.all_cases  # of full calls
@pytest.mark.parametrize(
    "call", ("full", pytest.param("packed", marks=SOME), pytest.param("short", marks=SOME))
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_have_no_faults(name: str, call: str) -> None:
    if call == "packed" and any(x in name for x in DENSE):
        pytest.skip("not for packed sequences")
    found = run(name, call)
    unused = UNUSED.get(name)
    assert [x for x in found.faults if unused is None or not unused.match(x)] == []
    assert all(found.noted), "every thread has done something"
    if call == "full" and not any(x in name for x in WITHOUT_TABLES):
        check_tables(name, found)


# --- The tables in their headers ---


def rows_of(table: str) -> Iterator[list[str]]:
    """The three cells of each row of the table in a header."""
    lines = table.splitlines()
    titles = ("barrier", "arrivals per phase", "who waits")
    for start in (i for i, line in enumerate(lines) if all(x in line for x in titles)):
        columns = [*map(lines[start].index, titles), None]
        row: list[str] = []
        for line in lines[start + 1 :]:
            if not line.startswith("//   "):
                break
            cells = [line[a:b].strip() for a, b in itertools.pairwise(columns)]
            if cells[0] and row:
                yield row
            if not cells[0]:
                cells = [f"{a} {b}".strip() for a, b in zip(row, cells, strict=True)]
            row = cells
        yield row


TRANSPOSES = "In a kernel that transposes V"
BIAS = "In a kernel with a bias"
PAGES = "In a kernel with pages"


def sides(text: str) -> set[str]:
    """Of which warpgroups it speaks."""
    words = {"producers": "producer|transpose", "consumers": "consumer"}
    return {side for side, found in words.items() if re.search(found, text)}


def arrivals_in(cell: str, consumers: int) -> Counter[str]:
    """From "2: producers, when ...; 4 a consumer: each warp": how many threads of each side."""
    counts: Counter[str] = Counter()
    for number, each, text in re.findall(r"(\d+)( a consumer)?(?:: ([^;]*)|(?=;|$))", cell):
        side = "consumers" if each else "".join(sides(text))
        counts[side] += int(number) * (consumers if each else 1)
    return counts


def table_of(kernel: str, transposes: bool) -> dict[str, list[str]]:
    """The rows by barrier. A kernel's own rows come in place of those of the kernel it is like.

    transposes: does it transpose V? Then it has other barriers of V, in a table of their own. So it
    is with a bias and with pages.
    """
    family = kernel.split()[0]
    files = ["forward"] * family.startswith("forward") + [family]
    rows = {}
    for file in dict.fromkeys(files):
        text = (FA3 / f"{file}.cuh").read_text()
        text = text if transposes else text.split(TRANSPOSES)[0]
        text, _, of_pages = text.partition(PAGES)
        text, _, of_bias = text.partition(BIAS)
        text += of_bias * ("bias" in kernel) + of_pages * ("pages" in kernel)
        for names, *cells in rows_of(text):
            pipelines = re.fullmatch(r"(full|empty)\((.+)\)", names)
            if pipelines is None:
                rows[re.sub(r" \(of each .*\)", "", names)] = cells
                continue
            for pipeline in pipelines[2].split(", "):
                rows[f"{pipelines[1]}({pipeline})"] = cells
    if transposes:
        del rows["full(V)"], rows["empty(V)"], rows["full(partial V)"]
    return rows


def arrivals_of(found: Run, moments: list[Moment]) -> tuple[Counter[str], bool]:
    """How many threads of each side have arrived in a phase, and has TMA?"""
    threads, count = len(found.threads), Counter[str]()
    for thread, _ in moments:
        if thread < threads:
            count[side_of(thread)] += found.threads[thread].weight
    return count, any(component >= threads for component, _ in moments)


def name_of(number: int) -> str:
    """A named barrier's, by the first ones of each name."""
    first = re.findall(r"k(\w+)Barrier = (\d+)", (FA3 / "cta.cuh").read_text())
    names = {"PingPong": "ping-pong", "DSStored": "dS stored"}
    return names[max((int(i), name) for name, i in first if int(i) <= number)[1]]


def ping_pong(found: Run) -> bool:
    return any(kind == "barrier" and i > 0 and name_of(i) == "ping-pong" for kind, i in found.named)


def check_tables(name: str, found: Run) -> None:
    """The tables of barriers in the kernel's header are true."""
    transposes = any("V^T" in x.name for x in found.barriers.values())
    table = table_of(name, transposes)
    consumers = len(found.threads) // 8 - 1
    waits = defaultdict(set)
    for thread, noted in enumerate(found.noted):
        for event, barrier, *_ in noted:
            if event == Event.Wait:
                waits[found.barriers[barrier].name].add(side_of(thread))
    used = [x for x in found.barriers.values() if x.phase > 0 or x.name in waits]
    for barrier in used:
        arrivals, who_waits = table[barrier.name.split("[")[0]]
        may_end = "unless there are no more" in arrivals
        for phase, moments in enumerate(barrier.arrived[: barrier.phase]):
            count, by_tma = arrivals_of(found, moments)
            assert count == arrivals_in(arrivals, consumers), (barrier.name, arrivals)
            if not (may_end and phase == barrier.phase - 1):
                may_differ = "TMA's bytes, unless" in arrivals
                assert may_differ or by_tma == ("TMA's bytes" in arrivals), (barrier.name, arrivals)
        assert waits[barrier.name] == sides(who_waits), (barrier.name, who_waits)
    in_table = {x for x in table if "(named)" not in x}
    if "bias" not in name:
        in_table -= {"full(bias)", "empty(bias)"}
    if ping_pong(found):  # then its exponentials have no turns
        in_table.discard("turn")
    assert in_table == {x.name.split("[")[0] for x in used}
    for (kind, number), barrier in found.named.items():
        if kind == "barrier" and number > 0:
            name_in_table = "sums" if name.startswith("bias_gradient") else name_of(number)
            arrivals, who_waits = table[f"{name_in_table} (named)"]
            threads = int(re.search(r"\d+", arrivals).group())
            assert barrier.arrivals == threads + 128 * ("threads count too" in who_waits)


# --- Does the model find faults? ---

Threads = list[list[Noted]]


def without(threads: Threads, begin: Noted, only: int | None = None) -> Threads:
    """Without the events that begin like this, of each thread number `only` of them or all."""
    kept = []
    for events in threads:
        places = [i for i, event in enumerate(events) if event[: len(begin)] == begin]
        removed = set(places if only is None else places[only:][:1])
        kept.append([event for i, event in enumerate(events) if i not in removed])
    return kept


def released_early(threads: Threads, barriers: set[int]) -> Threads:
    """With each release before the wait for matmuls that it follows."""
    swapped = [list(events) for events in threads]
    for events in swapped:
        for i, (event, barrier, *_) in enumerate(events):
            waits = [j for j in range(max(i - 3, 0), i) if events[j][0] == Event.MatmulWait]
            if event == Event.Arrive and barrier in barriers and waits:
                events.insert(waits[-1], events.pop(i))
    return swapped


def planted(threads: Threads, names: dict[int, str]) -> Iterator[tuple[str, Threads]]:
    """The threads with a fault, of one line of source: for each barrier and kind of event."""
    addresses: dict[str, list[int]] = defaultdict(list)
    for address, name in names.items():
        addresses[name.split("[")[0]].append(address)
    addresses.pop("fetch", None)
    for name, stages in addresses.items():
        inits = [i for i, x in enumerate(threads[0]) if x[:2] == (Event.Init, stages[0])]
        if not inits:  # turns, of a kernel with ping-pong
            continue
        (i,) = inits
        for change in (-1, 1):
            count = (Event.Init, stages[0], threads[0][i][2] + change)
            first = [*threads[0][:i], count, *threads[0][i + 1 :]]
            yield f"{name} counts {change:+}", [first, *threads[1:]]
        yield f"no arrival at {name}", without(threads, (Event.Arrive, stages[0]), 0)
        yield f"no late arrival at {name}", without(threads, (Event.ArriveLate, stages[0]), 0)
        yield f"no bytes at {name}", without(threads, (Event.Expect, stages[0]), 0)
        yield f"no wait at {name}", without(threads, (Event.Wait, stages[-1]), -1)
        yield f"too early at {name}", released_early(threads, set(stages))
    for event in (Event.Signal, Event.Sync, Event.Load):
        yield f"no {event.name}", without(threads, (event,), 1)
    for event in (Event.ProxyFence, Event.StoreWait, Event.WarpSync):
        yield f"no {event.name} at all", without(threads, (event,))


REDUNDANT = {
    # The last load is of V alone, which all have read before the stage in between is full.
    ("fa2 forward 64", "no wait at empty(K and V)"),
    # Ping-pong: consumer dV writes P when consumer dK has started the iteration after its last.
    ("backward_dkdv 256, stores dS", "no wait at empty(P)"),
    # All lanes release a stage; the one left brings a warp together before the hardware's barrier.
    ("bias_gradient 64", "no WarpSync at all"),
    # Bytes may arrive before they are expected: the phase waits for the arrival that expects them.
    ("forward 64, pages", "no WarpSync at all"),
    ("bias_gradient 64, small tiles", "no WarpSync at all"),
}
"""What other barriers ensure, too."""


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(
    "name",
    (
        *("forward 64, small Q", "forward 64, pages", "forward_fp8 64", "backward 64"),
        *("backward_dkdv 256, stores dS", "bias_gradient 64", "bias_gradient 64, small tiles"),
        *("forward 64, mask", "backward 64, mask", "fa1 forward 64", "fa1 backward 64"),
        *("fa2 forward 64", "fa2 backward 64"),
    ),
)
def test_planted_faults_are_found(name: str) -> None:
    """Each in calls with few tiles of many iterations, or in calls with many tiles of one."""
    missed: set[str] | None = None
    for call in ("small", "short"):
        found = run(name, call)
        missed = {
            fault
            for fault, threads in planted(found.noted, found.barrier_names)
            if (missed is None or fault in missed)
            and threads != found.noted
            and not Run(threads, found.barrier_names, until_fault=True).faults
        }
    assert missed == {fault for kernel, fault in REDUNDANT if kernel == name}


# --- Is one order enough? ---


def pipeline(source: random.Random) -> tuple[Threads, dict[int, int]]:
    """A producer and one or two consumers, and how many arrivals each barrier counts."""
    stages, consumers, iterations = source.choice(((1, 1, 3), (1, 2, 2), (2, 1, 4), (2, 2, 3)))
    threads: Threads = [[] for _ in range(1 + consumers)]
    for i in range(iterations):
        stage, parity = i % stages, i // stages % 2
        full, empty = 2 * stage, 2 * stage + 1
        threads[0] += [
            (Event.Wait, empty, parity ^ 1), (Event.Write, stage, 1), (Event.Arrive, full, 1)
        ]  # fmt: skip
        for consumer in threads[1:]:
            consumer += [
                (Event.Wait, full, parity),
                (Event.Read, stage, 1),
                (Event.Arrive, empty, 1),
            ]
    return threads, {x: consumers if x % 2 else 1 for x in range(2 * stages)}


def edit(threads: Threads, source: random.Random) -> None:
    """Removes an event, exchanges two, waits for the other parity, or takes another barrier."""
    events = source.choice(threads)
    i = source.randrange(len(events) - 1)
    event, barrier, *rest = events[i]
    match source.randrange(4):
        case 0:
            del events[i]
        case 1:
            events[i], events[i + 1] = events[i + 1], events[i]
        case 2 if event == Event.Wait:
            events[i] = (event, barrier, rest[0] ^ 1)
        case 3 if event in (Event.Wait, Event.Arrive):
            events[i] = (event, barrier ^ 1, *rest)


def fault_in_any_order(threads: Threads, arrivals: dict[int, int]) -> bool:
    """A search through all orders.

    For one that does not end, two accesses that may come at the same time, or an event whose phase
    depends on the order.
    """
    start = (0,) * len(threads), tuple((0, count) for count in arrivals.values())
    states, left = {start}, [start]
    phases: dict[tuple[int, int], int] = {}
    while left:
        places, barriers = left.pop()
        following = [(t, i, threads[t][i]) for t, i in enumerate(places) if i < len(threads[t])]
        accesses = [x for *_, x in following if x[0] in (Event.Read, Event.Write)]
        for one, other in itertools.combinations(accesses, 2):
            if one[1] == other[1] and Event.Write in (one[0], other[0]):
                return True
        stuck = bool(following)
        for thread, i, (event, x, *rest) in following:
            after = list(barriers)
            if event in (Event.Arrive, Event.Wait):
                phase, missing = barriers[x]
                if event == Event.Wait and (phase - 1) % 2 != rest[0]:
                    continue
                if phases.setdefault((thread, i), phase) != phase:
                    return True
                if event == Event.Arrive:
                    after[x] = (phase, missing - 1) if missing > 1 else (phase + 1, arrivals[x])
            stuck = False
            state = (*places[:thread], i + 1, *places[thread + 1 :]), tuple(after)
            if state not in states:
                states.add(state)
                left.append(state)
        if stuck:
            return True
    return False


def test_one_order_shows_the_faults_of_all() -> None:
    source = random.Random(0)
    seen: Counter[bool] = Counter()
    for number in range(600):
        threads, arrivals = pipeline(source)
        for _ in range(number % 3):
            edit(threads, source)
        begin: Threads = [[(Event.Sync, 0, len(threads))] for _ in threads]
        begin[0][:0] = [(Event.Init, x, count) for x, count in arrivals.items()]
        noted = [a + b for a, b in zip(begin, threads, strict=True)]
        found = Run(noted, {x: str(x) for x in arrivals}, (), [1] * 3)
        expected = fault_in_any_order(threads, arrivals)
        assert bool(found.faults) == expected, (threads, found.faults)
        seen[expected] += 1
    assert min(seen.values()) > 200
