"""Counters, rates, the end by tokens, and what is shown where, all with a fake clock."""

from __future__ import annotations

import io

import pytest

from mlxrun.batch.output_records import LineTokens
from mlxrun.batch.progress import BarView, PlainView, ProgressMeter, format_duration, make_view


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_and_end_by_tokens() -> None:
    """10 lines of 90 + 10 tokens at 100 tokens a second, two of them long done."""
    clock = Clock()
    meter = ProgressMeter(clock, total=12, done=2)
    assert meter.estimate_eta() is None
    assert meter.compute_rates() == (0.0, 0.0)
    meter.add_prompt(90, 1000)
    meter.add_tokens(0, 0, 0)
    clock.now += 1
    meter.add_tokens(90, 0, 10)
    meter.finish_line(False, 90, 10)
    assert meter.compute_rates() == (90.0, 10.0)
    assert meter.estimate_eta() == 9.0
    meter.start_line(LineTokens(90, 0, 5))
    meter.add_prompt(90, 1000)
    clock.now += 1
    meter.add_tokens(90, 0, 5)
    eta = meter.estimate_eta()
    assert eta is not None
    assert abs(eta - (900 - 95) * 2 / 195) < 1e-9  # what the second line has done is not to be done again


def test_before_the_first_answer_those_under_way_stand_in() -> None:
    """Answers are taken to be twice as long as they are by now, and never longer than they may be. Nothing is
    estimated while no answer has begun, and `max_tokens` alone, here of 1000 lines, says nothing."""
    clock = Clock()
    meter = ProgressMeter(clock, total=1000)
    tokens = LineTokens()
    meter.start_line(tokens)
    meter.add_prompt(10, 32_000)
    clock.now += 1
    meter.add_tokens(10, 0, 0)
    tokens.add(10, 0, 0)
    assert meter.estimate_eta() is None
    clock.now += 1
    meter.add_tokens(0, 0, 10)
    tokens.add(0, 0, 10)
    assert meter.estimate_eta() == (999 * 30 + 10) * 2 / 20
    short = ProgressMeter(clock, total=4)
    short.start_line(tokens)
    short.add_prompt(10, 12)
    clock.now += 2
    short.add_tokens(10, 0, 10)
    assert short.estimate_eta() == (3 * 22 + 2) * 2 / 20


def test_long_answers_under_way_count() -> None:
    """Short answers end first: those that are longer by now than the average of the others raise it."""
    clock = Clock()
    meter = ProgressMeter(clock, total=4)
    slow = LineTokens(10, 0, 50)
    meter.start_line(slow)
    meter.add_prompt(10, 100)
    meter.add_prompt(10, 100)
    clock.now += 8
    meter.add_tokens(20, 0, 60)
    assert meter.running == 1
    meter.finish_line(False, 10, 10)
    assert meter.estimate_eta() == 2 * (10 + 30) * 8 / 80  # 30: the average of 10 and 50
    meter.stop_line(slow)
    meter.finish_line(True, 0, 0)
    assert meter.running == 0
    assert meter.estimate_eta() == 2 * (10 + 10) * 8 / 80


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
