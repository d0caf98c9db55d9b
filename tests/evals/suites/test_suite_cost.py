"""What a suite costs is counted before it runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.settings import Config
from mlxrun.core.errors import ModelLoadError
from mlxrun.evals.suites.suite_cost import CellCost, CostCheck, print_costs
from mlxrun.jobs.lines.job_check import CheckedLines
from tests.helpers.suite_files import CAPITALS, read_cells, write_suite
from tests.helpers.tokenizers import FakeModelInfo

TEXT = CAPITALS.replace("{tiny: }", "{tiny: , gone: {set: {model.path: org/gone}}}") + (
    "        generation: {max_tokens: 10, n: 2}\n    seeds: [1, 2]\n"
)


async def count(
    folder: Path, limit: int | None = None, text: str = TEXT, **records: Any
) -> tuple[list[CellCost], list[str], int]:
    """The costs, what was said, and how many models were read."""
    _, cells, jobs = read_cells(write_suite(folder, text))
    loaded: list[str] = []

    def load(config: Config) -> ModelInfo:
        loaded.append(config.model.path)
        if config.model.path == "org/gone":
            raise ModelLoadError("there is no such model")
        return FakeModelInfo(context_length=64)

    said: list[str] = []
    costs = await CostCheck(folder / "suite.out", jobs, load, limit, records, said.append).check(cells)
    return costs, said, len(loaded)


async def test_tokens_of_each_cell(tmp_path: Path) -> None:
    costs, said, loaded = await count(tmp_path)
    assert [cost.cell.name for cost in costs][:2] == ["tiny/capitals/seed-1", "tiny/capitals/seed-2"]
    first = costs[0].found
    assert first is not None and first is costs[1].found  # seeds change no prompt
    assert (first.lines, first.requests, first.max_tokens, first.refused) == (3, 6, 60, 0)
    assert first.prompt_tokens > 3 * len("Capital of Peru?") and said == []
    assert [cost.error for cost in costs[2:]] == ["there is no such model"] * 2 and loaded == 2
    assert costs[0].seconds is None
    assert not (tmp_path / "suite.out").exists()


async def test_time_by_the_speed_of_earlier_cells(tmp_path: Path) -> None:
    done = {"model": "tiny", "tokens": {"prompt": 90, "output": 10}, "seconds": 5.0}
    unknown = {"model": "tiny", "tokens": None, "seconds": 3.0}
    costs, _, _ = await count(tmp_path, first=done, second=unknown, third={**done, "model": "gone"})
    found = costs[0].found
    assert found is not None
    assert costs[0].seconds == (found.prompt_tokens + found.max_tokens) * 0.05


async def test_lines_that_are_done_take_no_time(tmp_path: Path) -> None:
    _, cells, jobs = read_cells(write_suite(tmp_path, TEXT))
    digest = jobs.compute_digest(cells[0], tmp_path / "suite.out" / cells[0].name / "job.jsonl")
    record = {"model": "tiny", "tokens": {"prompt": 90, "output": 10}, "seconds": 5.0, "done": 1, "failed": 1}
    record |= {"job_sha256": digest, "config_hash": cells[0].config_hash}
    costs, _, _ = await count(tmp_path, **{cells[0].name: record})
    assert [cost.done for cost in costs[:2]] == [2, 0]
    times = [cost.seconds for cost in costs[:2]]
    assert times[0] is not None and times[1] is not None and 2.9 < times[1] / times[0] < 3.1
    for changed in ({"job_sha256": "0"}, {"config_hash": "0"}):
        costs, _, _ = await count(tmp_path, **{cells[0].name: record | changed})
        assert costs[0].done == 0


async def test_a_limit_and_refused_lines(tmp_path: Path) -> None:
    text = TEXT.replace("Capital of", "Capital of " + "x" * 70)
    costs, said, _ = await count(tmp_path, 2, text)
    found = costs[0].found
    assert found is not None and (found.lines, found.refused) == (2, 2)
    assert len(said) == 2 and said[0].startswith("tiny/capitals/seed-1: line 1: ")


def test_the_costs(tmp_path: Path) -> None:
    text = CAPITALS.replace("{tiny: }", "{tiny: , big: , gone: }")
    _, cells, _ = read_cells(write_suite(tmp_path, text))
    found = CheckedLines(lines=3, requests=3, prompt_tokens=1000, max_tokens=60)
    costs = [
        CellCost(cells[0], found, 61.0, done=2),
        CellCost(cells[1], found),
        CellCost(cells[2], error="no [such] model"),
    ]
    stream = io.StringIO()
    print_costs(costs, {"embedded": 7_600_000}, stream)
    lines = stream.getvalue().splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["tiny/capitals/seed-0", "3", "2", "0", "1,000", "60", "<=", "1:01"],
        ["big/capitals/seed-0", "3", "0", "0", "1,000", "60", "unknown"],
        ["gone/capitals/seed-0", "-", "-", "-", "-", "-", "-"],
    ]
    assert lines[4:] == [
        "gone: cannot be loaded: no [such] model",
        "3 cells, 6 lines (2 done already), 2,000 prompt tokens, at most 120 output tokens",
        "time: unknown for models that have not run yet in this folder",
        "time: at most 1:01, by the speed of earlier cells",
        "memory: embedded has 7.6 MB of weights",
    ]
