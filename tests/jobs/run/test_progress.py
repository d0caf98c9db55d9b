"""Counters, rates, the end by tokens, and what is shown where, all with a fake clock."""

from __future__ import annotations

import io
import random

import pytest

from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.run import progress
from mlxrun.jobs.run.progress import BarView, PlainView, ProgressMeter, format_duration, make_view


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates() -> None:
    clock = Clock()
    meter = ProgressMeter(clock, total=12, done=2)
    assert meter.compute_rates() == (0.0, 0.0)
    meter.add_tokens(0, 0, 0)
    clock.now += 1
    meter.add_tokens(90, 0, 10)
    assert meter.compute_rates() == (90.0, 10.0)


def make_meter(
    clock: Clock, total: int, answers: list[int], seconds: float = 8.0, reused: int = 0
) -> ProgressMeter:
    """A run of so many seconds that has answered these lines, each with a prompt of 90 tokens and max_tokens
    of 100; `reused`: of each prompt."""
    meter = ProgressMeter(clock, total=total)
    for output in answers:
        meter.add_prompt(90, 100)
        meter.add_tokens(90 - reused, reused, output)
        meter.finish_line(False, 90, output)
    clock.now += seconds
    return meter


def test_the_end_is_not_estimated_from_a_few_tokens() -> None:
    """The first seconds of a run compute prompts, or find them in the cache: they say nothing of its answers.
    Lines of earlier runs say nothing of this one."""
    assert make_meter(Clock(), 24, [10, 10]).estimate_eta() is None
    assert make_meter(Clock(), 24, [10, 10, 10], seconds=4.9).estimate_eta() is None
    assert make_meter(Clock(), 24, [10, 10, 10]).estimate_eta() is not None
    resumed = make_meter(Clock(), 24, [10])
    resumed.done += 10
    assert resumed.estimate_eta() is None
    assert make_meter(Clock(), 1, [10], seconds=0.1).estimate_eta() == 0.0


def test_the_end_by_tokens() -> None:
    """All lines are alike: what is left takes as long for each of them as what is done."""
    meter = make_meter(Clock(), 40, [10] * 4)
    assert meter.estimate_eta() == 36 * 8 / 4
    meter.start_line(LineTokens(45, 0, 0))
    assert meter.estimate_eta() == (35 * 10 + 10) * 8 / 40  # of the kind that takes longer
    found = make_meter(Clock(), 40, [10] * 4, reused=90).estimate_eta()
    assert found == 36 * 8 / 4  # the cache has all prompts


def test_once_all_prompts_are_computed_only_answers_take_time() -> None:
    """24 lines of one batch, of which three have ended: 90 tokens of a prompt are soon computed, and the rate
    of all tokens would promise a second."""
    clock = Clock()
    meter = make_meter(clock, 24, [10] * 3)
    for _ in range(21):
        meter.add_prompt(90, 100)
        meter.add_tokens(90, 0, 5)
        meter.start_line(LineTokens(90, 0, 5))
    assert meter.estimate_eta() == pytest.approx(21 * 5 * 8 / (30 + 21 * 5))


def test_long_answers_under_way_count() -> None:
    """Short answers end first: those that are longer by now raise the average of what waits, and are taken to
    get half as much again: while one is under way, the job does not end at once."""
    clock = Clock()
    meter = make_meter(clock, 5, [10] * 3)
    slow = LineTokens(90, 0, 30)
    meter.start_line(slow)
    meter.add_tokens(90, 0, 30)
    assert meter.running == 1
    assert meter.estimate_eta() == pytest.approx((18.75 + 15) * 8 / 60)  # the average of 10, 10, 10, 45
    slow.add(0, 0, 60)
    meter.add_tokens(0, 0, 60)
    assert meter.estimate_eta() == pytest.approx((41.25 + 45) * 8 / 120)
    meter.stop_line(slow)
    meter.finish_line(True, 0, 0)
    assert meter.running == 0
    assert meter.estimate_eta() == pytest.approx(max(10 * 8 / 120, 90 * 8 / 360))


def measure_eta_error(seed: int, rows: int = 16) -> float:
    """The mean error of the end of 200 lines, whose answers have from a few to 2,000 tokens, as a share of
    the run; a step takes 50 ms and 5 ms for each row."""
    rng, clock = random.Random(seed), Clock()
    meter, start = ProgressMeter(clock, total=200), clock.now
    left = [min(int(rng.lognormvariate(5.3, 1)) + 1, 2000) for _ in range(200)]
    active: list[tuple[LineTokens, int]] = []
    ends: list[float] = []  # as they were estimated
    steps = 0
    while left or active:
        while left and len(active) < rows:
            active.append((LineTokens(), left.pop()))
            meter.start_line(active[-1][0])
            meter.add_prompt(100, 2000)
        clock.now += 0.05 + 0.005 * len(active)
        for tokens, wanted in [*active]:
            tokens.add(0, 0, 1)
            meter.add_tokens(0, 0, 1)
            if tokens.output == wanted:
                active.remove((tokens, wanted))
                meter.stop_line(tokens)
                meter.finish_line(False, 100, wanted)
        steps += 1
        if steps % 20 == 0 and (eta := meter.estimate_eta()) is not None:
            ends.append(clock.now + eta)
    return sum(abs(end - clock.now) for end in ends) / len(ends) / (clock.now - start)


def test_the_end_where_answers_are_of_very_different_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long ones end last. The twin takes those under way to end at once."""
    assert sum(measure_eta_error(seed) for seed in range(4)) / 4 < 0.13
    monkeypatch.setattr(progress, "MORE", 0.0)
    assert sum(measure_eta_error(seed) for seed in range(4)) / 4 > 0.16


def test_rates_forget() -> None:
    """A rate is that of the last half minute, not of the whole job."""
    clock = Clock()
    meter = ProgressMeter(clock, total=1)
    for second in range(120):
        meter.add_tokens(100 if second < 60 else 0, 0, 1)
        clock.now += 1
        rates = meter.compute_rates()
    assert rates[0] == 0.0
    assert 0.9 < rates[1] < 1.1


def test_cached_share_and_status() -> None:
    clock = Clock()
    meter = ProgressMeter(clock, total=3, lines=5)
    meter.add_tokens(25, 75, 0)
    clock.now += 1
    meter.add_tokens(0, 0, 4)
    meter.start_line(LineTokens())
    meter.start_line(LineTokens())
    found = meter.build_status()
    assert found["cached_share"] == meter.cached_share == 0.75
    assert (found["running"], found["total"], found["lines"]) == (2, 3, 5)
    assert found["tokens"] == {"computed": 25, "reused": 75, "output": 4}
    assert "cached 75%" in meter.format_line()


def test_plain_lines_in_a_pipe() -> None:
    """One line every ten seconds and one at the end, no control characters."""
    clock = Clock()
    stream = io.StringIO()
    meter = ProgressMeter(clock, total=7200)
    view = make_view(meter, stream)
    assert isinstance(view, PlainView)
    meter.add_prompt(10, 10)
    meter.add_tokens(0, 0, 0)
    for second in range(25):
        clock.now += 1
        meter.add_tokens(10, 0, 10)
        meter.add_prompt(10, 10)
        meter.finish_line(second == 3, 10, 10)
        view.update()
    view.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["10/7200", "20/7200", "25/7200"]
    assert lines[1] == "20/7200 lines, 1 failed, prompt 10 tok/s, output 10 tok/s, ETA 1:59:40"
    assert "\x1b" not in stream.getvalue()


def test_the_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    meter = ProgressMeter(Clock(), total=4, done=1, failed=1)
    view = make_view(meter, stream)
    assert isinstance(view, BarView)
    view.update()
    view.close()
    assert "2/4" in stream.getvalue()
    assert "1 failed" in stream.getvalue()


def test_one_of_several_jobs_has_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    meter = ProgressMeter(clock, total=4, done=1)
    view = make_view(meter, title="tiny/[sums]")
    clock.now += 11
    view.update()
    assert capsys.readouterr().err.startswith("tiny/[sums]: 1/4 lines, 0 failed, ")
    view.close()
    assert capsys.readouterr().err == ""
    stream = io.StringIO()
    BarView(meter, stream, "tiny/[sums]").close()
    assert "tiny/[sums] " in stream.getvalue()


def test_clock_text() -> None:
    assert [format_duration(s) for s in (None, 0, 59.6, 3599, 3661)] == [
        "-",
        "0:00",
        "1:00",
        "59:59",
        "1:01:01",
    ]
