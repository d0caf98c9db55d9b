"""The file of earlier runs, and the range that the next job's time is in."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from mlxrun.jobs.records import job_paces
from mlxrun.jobs.records.job_paces import JobPace, estimate_seconds, note_pace, read_paces

PACE = JobPace("aa", 1_700_000_000, 10.0, 20, 1000, 400, 600)


def test_runs_are_noted_and_read_by_their_model(tmp_path: Path) -> None:
    path = tmp_path / "new" / "paces.jsonl"
    other = replace(PACE, model="bb")
    runs = [replace(PACE, ended=number) for number in range(8)]
    for run in (*runs, other):
        note_pace(path, run)
    assert read_paces(path, "bb") == [other]
    assert read_paces(path, "aa") == runs[-job_paces.MOST_USED :]
    assert read_paces(path, "cc") == [] == read_paces(tmp_path / "none", "aa")
    line = json.loads(path.read_text().splitlines()[0])
    assert (line["prefill_rate"], line["decode_rate"]) == (60.0, 60.0)


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_paces, "MOST_STORED", 3)
    path = tmp_path / "paces.jsonl"
    for number in range(5):
        note_pace(path, replace(PACE, ended=number))
    assert [pace.ended for pace in read_paces(path, "aa")] == [2, 3, 4]


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "no json",
        "[]",
        "{}",
        json.dumps(PACE.describe() | {"seconds": 0}),
        json.dumps(PACE.describe() | {"lines": -1}),
        json.dumps(PACE.describe() | {"output_tokens": "many"}),
        json.dumps(PACE.describe() | {"seconds": None}),
        "[" * 100_000,
    ],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, bad: str) -> None:
    """And it is gone with the next run that is noted."""
    path = tmp_path / "paces.jsonl"
    path.write_text(f"{bad}\n{json.dumps(PACE.describe())}\n")
    assert read_paces(path, "aa") == [PACE]
    note_pace(path, PACE)
    assert len(path.read_text().splitlines()) == 2


def test_a_file_that_is_none_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The job is done: only the log says it."""
    note_pace(tmp_path, PACE)
    assert read_paces(tmp_path, "aa") == [] and "could not be noted" in caplog.text
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert read_paces(tmp_path / "binary", "aa") == []


def test_the_same_job_again_takes_the_same_time() -> None:
    assert estimate_seconds([PACE], 20, 1000, 5000) == (10.0, 10.0)
    assert estimate_seconds([PACE], 40, 2000, 5000) == (20.0, 20.0)
    assert estimate_seconds([], 40, 2000, 5000) is None


def test_another_mix_is_a_range() -> None:
    """Three times the prompts with answers as long; and answers that `max_tokens` cuts."""
    assert estimate_seconds([PACE], 20, 3000, 5000) == (10.0, 30.0)
    assert estimate_seconds([PACE], 20, 1000, 300) == (5.0, 10.0)
    slower = replace(PACE, seconds=14.0)
    assert estimate_seconds([PACE, slower], 20, 1000, 5000) == (10.0, 14.0)


def test_embeddings_have_no_output() -> None:
    pooled = replace(PACE, output_tokens=0)
    assert estimate_seconds([pooled], 20, 500, 0) == (5.0, 5.0)
    assert estimate_seconds([replace(pooled, prompt_tokens=0)], 20, 500, 0) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_true_time_is_in_the_range(seed: int) -> None:
    """Whatever a prompt token and an output token cost, as long as both cost the same in both jobs."""
    rng = random.Random(seed)
    prompt_cost, output_cost = rng.random(), rng.random()
    had, want = ((rng.randrange(1, 10_000), rng.randrange(1, 10_000)) for _ in range(2))
    lines = rng.randrange(1, 50)
    pace = JobPace("aa", 0, had[0] * prompt_cost + had[1] * output_cost, lines, had[0], 0, had[1])
    low, high = estimate_seconds([pace], lines * want[1] // had[1], want[0], 10**9) or (0, 0)
    output = had[1] / lines * (lines * want[1] // had[1])
    assert low - 1e-6 <= want[0] * prompt_cost + output * output_cost <= high + 1e-6
