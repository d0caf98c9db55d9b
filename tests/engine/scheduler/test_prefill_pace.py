"""The size of a step follows the time that the steps before took."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.core.step_plan import PrefillChunk, StepCosts, StepPlan
from mlxrun.engine.scheduler.prefill_pace import PrefillPace


def plan(tokens: int, *decode: str) -> StepPlan:
    chunks = (PrefillChunk("p", 0, tokens),) if tokens else ()
    return StepPlan(prefill=chunks, decode=decode)


def make_pace(**options: Any) -> PrefillPace:
    return PrefillPace(**{"step_ms": 200, "chunk": 512, "min_tokens": 64, "costs": StepCosts()} | options)


def record_all(pace: PrefillPace, *steps: tuple[StepPlan, float], times: int = 1) -> None:
    """Steps that follow each other; each takes its own time."""
    before = None
    for step, seconds in steps * times:
        pace.record_step(step, before, seconds)
        before = step


def test_a_chunk_until_steps_were_measured() -> None:
    pace = make_pace()
    assert pace.limit_tokens(4096, False) == 512
    assert pace.limit_tokens(100, False) == 100
    record_all(pace, (plan(512), 0.001))  # it may only have been launched
    assert pace.limit_tokens(4096, False) == 512


@pytest.mark.parametrize(
    ("tokens_per_second", "limit"),
    [(100_000, 4096), (10_000, 1536), (2561, 512), (2500, 256), (700, 128), (10, 64)],
)
def test_as_many_tokens_as_fit_into_the_time(tokens_per_second: int, limit: int) -> None:
    """Whole chunks of the grid, or a half, a quarter or an eighth of one."""
    pace = make_pace()
    record_all(pace, (plan(512), 512 / tokens_per_second), times=20)
    assert pace.limit_tokens(4096, False) == limit


def test_a_chunk_that_nearly_fits_is_tried_where_launches_take_the_time() -> None:
    """Steps take 40 ms and 5 us a token. The twin measures halves for ever, and tries no more."""
    for least, limit in ((0.75, 4096), (1.0, 2048)):
        pace = make_pace(step_ms=90, chunk=4096, costs=StepCosts(least_fitting=least))
        tokens = 2048
        for _ in range(10):
            record_all(pace, (plan(tokens), 0.04 + 5e-6 * tokens), times=2)
            tokens = pace.limit_tokens(4096, False)
        assert tokens == limit


def test_no_limit() -> None:
    pace = make_pace(step_ms=0)
    record_all(pace, (plan(512), 100.0), times=3)
    assert pace.limit_tokens(4096, False) == 4096


def test_chunks_are_whole_where_they_must_be() -> None:
    """In reproducible mode the smallest step is a chunk of the grid."""
    pace = make_pace(min_tokens=512)
    record_all(pace, (plan(512), 100.0), times=3)
    assert pace.limit_tokens(4096, False) == 512


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_prompt_in_one_step_is_measured_where_its_time_passes(is_lazy: bool) -> None:
    """In its own step where it is computed while its graph is built, and else in the step that waits for it.
    The other one takes no time, and must not make the device look fast."""
    pace = make_pace()
    for _ in range(4):
        own, waiting = (0.001, 2.0) if is_lazy else (2.0, 0.001)
        record_all(pace, (plan(2048), own), (plan(20, "a"), waiting), (plan(0, "a"), 0.001))
    assert pace.limit_tokens(4096, False) in (64, 128)  # 1,024 tokens a second, or fewer


def test_the_newest_steps_count_most() -> None:
    """A deep prompt slows down; the next short one is fast again."""
    pace = make_pace()
    record_all(pace, (plan(4096), 0.1), times=2)
    record_all(pace, (plan(256), 0.5), times=16)
    assert pace.limit_tokens(4096, False) == 64
    record_all(pace, (plan(4096), 0.1), times=4)
    assert pace.limit_tokens(4096, False) >= 1536


def test_decoding_rows_take_their_part_of_a_step() -> None:
    """Their time does not make prompts look slow, and leaves less for them."""
    pace = make_pace()
    record_all(pace, (plan(0, "a", "b"), 0.1), times=20)
    record_all(pace, (plan(512, "a", "b"), 0.19), times=20)  # so 5,689 tokens a second
    assert pace.limit_tokens(4096, False) == 1024
    assert pace.limit_tokens(4096, True) == 512
    record_all(pace, (plan(0, "a"), 1.0), times=20)  # slower than the whole limit
    assert pace.limit_tokens(4096, True) == 256


@pytest.mark.parametrize(
    ("tokens_per_second", "limit"), [(100_000, 4096), (12_000, 512), (10_000, 256), (1000, 128), (10, 64)]
)
def test_a_prompt_by_itself_has_shorter_steps(tokens_per_second: int, limit: int) -> None:
    """A quarter of the time here, but no chunk of 64 tokens unless that is all that fits into the whole."""
    pace = make_pace(costs=StepCosts(lone_share=0.25))
    record_all(pace, (plan(512), 512 / tokens_per_second), times=20)
    assert pace.limit_tokens(4096, False, lone=True) == limit
    assert pace.limit_tokens(4096, False) >= limit


@pytest.mark.parametrize(
    ("tokens_per_second", "limit"), [(100_000, 4096), (30_000, 2048), (9000, 1536), (2000, 256)]
)
def test_a_prompt_by_itself_has_steps_of_some_tokens(tokens_per_second: int, limit: int) -> None:
    """However slow short steps have made the pace look, if as many fit into the whole time."""
    pace = make_pace(costs=StepCosts(lone_share=0.25, lone_tokens=2048))
    record_all(pace, (plan(512), 512 / tokens_per_second), times=20)
    assert pace.limit_tokens(4096, False, lone=True) == limit


def test_a_step_with_drafts_is_measured_as_one() -> None:
    """It is launched, and then waited for before the next one is planned. On a GPU a step beside it takes as
    long: 20 ms for a chunk, and 12 ms to decode, of which launching takes 2 or 9."""
    ahead = make_pace(step_ms=61, chunk=16)
    decode, both, wait = plan(0, "a"), plan(512, "a"), StepPlan()
    record_all(ahead, *[(decode, 0.012)] * 3, (both, 0.012), (decode, 0.032), times=8)
    for launching in (0.002, 0.009):
        drafting, waiting = make_pace(step_ms=61, chunk=16), 0.012 - launching
        once = [(decode, launching), (wait, waiting)]
        record_all(drafting, *once * 3, (both, launching), (wait, waiting + 0.02), *once, times=8)
        idle = make_pace(step_ms=61, chunk=16)  # again and again
        for _ in range(8):
            record_all(idle, *once * 3, (both, launching), (wait, waiting + 0.02), *once)
        for decodes in (True, False):
            expected = ahead.limit_tokens(4096, decodes)
            assert drafting.limit_tokens(4096, decodes) == idle.limit_tokens(4096, decodes) == expected > 1200


def test_a_prompt_whose_first_token_is_waited_for_is_measured_as_one_step() -> None:
    """5,689 tokens a second, of whose time a third is that of the launch."""
    pace = make_pace()
    record_all(pace, (plan(512), 0.03), (StepPlan(), 0.06), times=4)
    assert pace.limit_tokens(4096, False) == 1024


def test_a_few_tokens_say_nothing() -> None:
    pace = make_pace()
    record_all(pace, (plan(512), 0.09), times=3)
    record_all(pace, (plan(3), 0.05), times=10)
    assert pace.limit_tokens(4096, False) == 1024


def test_images_are_measured_apart_from_text() -> None:
    """What they take does not make text look slow, nor decoding rows."""
    pace = make_pace(step_ms=200)
    record_all(pace, (plan(512), 0.1), times=3)
    chunk = PrefillChunk("p", 0, 128)
    record_all(pace, (StepPlan(prefill=(chunk,), encode=("q",)), 3.0), times=20)
    record_all(pace, (StepPlan(decode=("a",), encode=("q",)), 3.0), times=20)
    assert pace.limit_tokens(4096, False) == pace.limit_tokens(4096, True) == 1024
    assert pace.image_seconds == 0.05
    assert make_pace(step_ms=0).image_seconds is None
