"""Counters, rates, the end by tokens, and what is shown where, all with a fake clock."""

from __future__ import annotations

import io
import json
from pathlib import Path

from mlxrun.batch.manifest import StatusFile
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
    meter.finish_line(False, 90, 10, 100)
    assert meter.compute_rates() == (90.0, 10.0)
    assert meter.estimate_eta() == 9.0
    meter.add_prompt(90, 1000)
    clock.now += 1
    meter.add_tokens(90, 0, 5)
    eta = meter.estimate_eta()
    assert eta is not None
    assert abs(eta - (900 - 95) * 2 / 195) < 1e-9  # what the second line has done is not to be done again


def test_before_the_first_answer_max_tokens_stand_in() -> None:
    clock = Clock()
    meter = ProgressMeter(clock, total=4)
    meter.add_prompt(10, 90)
    meter.add_tokens(0, 0, 0)
    clock.now += 2
    meter.add_tokens(10, 0, 10)
    assert meter.estimate_eta() == (4 * 100 - 20) / 10


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


def test_cached_share_and_status(tmp_path: Path) -> None:
    clock = Clock()
    meter = ProgressMeter(clock, total=3)
    meter.add_tokens(25, 75, 0)
    clock.now += 1
    meter.add_tokens(0, 0, 4)
    meter.running = 2
    path = tmp_path / "status.json"
    status = StatusFile(path)
    status.write("running", meter, force=True)
    found = json.loads(path.read_text())
    assert found["cached_share"] == meter.cached_share == 0.75
    assert (found["state"], found["running"], found["tokens"]) == (
        "running",
        2,
        {"computed": 25, "reused": 75, "output": 4},
    )
    path.unlink()
    status.write("running", meter)
    assert not path.exists()  # at most once a second
    assert "cached 75%" in meter.format_line()


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    StatusFile(tmp_path / "no" / "status.json").write("running", ProgressMeter(Clock()), force=True)
    assert not (tmp_path / "no").exists()


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
        meter.finish_line(second == 3, 10, 10, 20)
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


def test_clock_text() -> None:
    assert [format_duration(s) for s in (None, 0, 59.6, 3599, 3661)] == [
        "-",
        "0:00",
        "1:00",
        "59:59",
        "1:01:01",
    ]
