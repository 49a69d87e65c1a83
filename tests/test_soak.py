"""Random problems for as long as --soak says: `make soak`. Without that option nothing is here.

Would catch what no grid thought of: a combination of lengths and options. Every run draws others; a
failure prints the smallest problem that fails, ready to be pasted into a test.
"""

from __future__ import annotations

import time

import pytest
from attention_testing import VARIANTS, Problem, check, runnable
from grids import problems
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

LONGEST = {"cpu": 200, "cuda": 1500}
AT_ONCE = 100  # hypothesis counts examples; the clock is looked at in between


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_soak(variant: str, device: str, pytestconfig: pytest.Config) -> None:
    stop = time.monotonic() + pytestconfig.option.soak
    done = 0
    failed = False  # then hypothesis calls again, also when time is over

    @settings(
        max_examples=AT_ONCE,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=tuple(HealthCheck),
    )
    @given(drawn=problems(LONGEST[device]), deterministic=st.booleans())
    def some(drawn: Problem, deterministic: bool) -> None:
        nonlocal done, failed
        if time.monotonic() >= stop and not failed:
            return
        try:
            check(runnable(variant, drawn), variant, device, deterministic=deterministic)
        except Exception:
            failed = True
            raise
        done += 1

    while time.monotonic() < stop:
        seed(time.time_ns())(some)()
    print(f"{done} problems")
