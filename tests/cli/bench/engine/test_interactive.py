"""The workload `interactive` of `mlxrun bench engine`: what is sent when, its numbers, and a real run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxrun.cli.bench.engine.interactive import (
    InteractiveContender,
    InteractiveRequests,
    compute_interactive_metrics,
    run_interactive,
)
from mlxrun.cli.bench.engine.measurement import INTERACTIVE_MEASURES, MEASURES, RequestOutput
from mlxrun.cli.bench.engine.workloads import DEFAULT_WORKLOADS, MOMENTS, BenchRequest, make_workload
from mlxrun.cli.bench.serve.interactive import MEASURES as SERVE_MEASURES
from mlxrun.cli.commands.bench import command
from mlxrun.core.errors import MlxrunError

WORKLOAD = make_workload("interactive", 1.0, 100)


@dataclass
class FakeRow:
    request: BenchRequest
    computed: int = 0
    tokens: int = 0


class FakeContender:
    """Computes 1024 tokens of each prompt a step, or a token; a step takes a second. A row has a byte for
    each token of its prompt that is computed; that of an aborted one stays in use for `holds` steps more."""

    def __init__(self, holds: int = 0, speed_up: float = 1.0, leaks: bool = False) -> None:
        self.now = 100.0
        self.log: list[tuple[float, str]] = []
        self._holds, self._speed_up, self._leaks = holds, speed_up, leaks
        self._rows: dict[str, FakeRow] = {}
        self._held: list[tuple[float, int]] = []
        self._chunk = 1024.0

    def read_memory(self) -> int:
        held = sum(nbytes for until, nbytes in self._held if self.now <= until)
        return 10**6 + held + sum(row.computed for row in self._rows.values())

    def add(self, requests: Sequence[BenchRequest]) -> None:
        for request in requests:
            self.log.append((self.now, request.id))
            self._rows[request.id] = FakeRow(request)

    def step(self) -> list[RequestOutput]:
        assert self._rows, "a step with nothing to do"
        self.now += 1.0
        outputs = []
        for row in list(self._rows.values()):
            row.computed = min(row.computed + int(self._chunk), len(row.request.prompt))
            if row.computed == len(row.request.prompt):
                row.tokens += 1
                done = row.tokens == row.request.output
                outputs.append(RequestOutput(row.request.id, (7,), done))
                if done:
                    del self._rows[row.request.id]
                    self._chunk *= self._speed_up
        return outputs

    def abort(self, request_id: str) -> None:
        self.log.append((self.now, f"abort {request_id}"))
        self._held.append((self.now + self._holds, self._rows.pop(request_id).computed))

    def settle(self) -> None:
        assert not self._rows
        self._held = self._held if self._leaks else []

    def close(self) -> None:
        pass


def measure(contender: FakeContender, moment: float) -> dict[str, float | None]:
    workload = replace(WORKLOAD, moment=moment)
    trace, freed = run_interactive(contender, workload, lambda: contender.now, contender.read_memory)
    return compute_interactive_metrics(trace, workload, freed)


def test_the_requests_are_short_ones_alone_then_pairs_with_a_long_one() -> None:
    requests = InteractiveRequests.split(WORKLOAD)
    assert isinstance(FakeContender(), InteractiveContender)
    assert [len(each.prompt) for each in requests.alone] == [256] * 5
    assert {len(each.prompt) for each in (*requests.long, requests.in_front, requests.cancelled)} == {16384}
    assert len(requests.behind.prompt) == len(requests.after.prompt) == 256
    assert len({each.prompt for each in WORKLOAD.requests}) == len(WORKLOAD.requests)
    assert "interactive" not in DEFAULT_WORKLOADS


def test_times_count_from_when_a_request_came_not_from_the_end_of_the_step() -> None:
    """A long prompt takes 16 s: at 35 % of that, after 5.6 s, the sixth step is running, until 6.0."""
    contender = FakeContender()
    got = measure(contender, 0.35)
    assert got == pytest.approx(
        {"alone": 1.0, "behind": 1.4, "ratio": 1.4, "after_cancel": 1.4, "freed": 1.4, "long_ttft": 16.0}
        | {"moment": 0.35}
    )
    requests = InteractiveRequests.split(WORKLOAD)
    came = {name: at for at, name in contender.log}
    assert came[requests.behind.id] == came[requests.in_front.id] + 6
    assert came[f"abort {requests.cancelled.id}"] == came[requests.after.id]
    assert came[requests.after.id] == came[requests.cancelled.id] + 6
    # The long prompt is over, its second token included, before the next one is sent.
    assert came[requests.cancelled.id] == came[requests.in_front.id] + 17


def test_memory_that_is_held_longer_counts_until_it_is_free() -> None:
    assert measure(FakeContender(holds=4), 0.5)["freed"] == 5.0
    assert measure(FakeContender(holds=100), 0.5)["freed"] == 8.0  # once the engine is idle
    with pytest.raises(MlxrunError, match="still in use when the engine is idle"):
        measure(FakeContender(holds=100, leaks=True), 0.5)


def test_a_long_prompt_that_is_over_too_soon_gives_no_numbers() -> None:
    """Each request that ends makes the engine faster, so that half of the earlier time is too late."""
    with pytest.raises(MlxrunError, match=r"16,384 tokens, takes .* at 50% of that: give a larger --scale"):
        measure(FakeContender(speed_up=2.5), 0.5)


def test_the_measures_have_the_titles_of_the_workload_for_servers() -> None:
    ours = {key: (measure.title, measure.unit) for key, measure in MEASURES.items()}
    theirs = {key: (measure.title, measure.unit) for key, measure in SERVE_MEASURES.items()}
    assert all(ours[key] == theirs[key] for key in INTERACTIVE_MEASURES)


def test_both_sides_run_for_real(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    args = ["engine", "--scale", "0.03", "--repeat", "1", "--workload", "interactive", "--json", str(path)]
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0
    part = json.loads(path.read_text())["workloads"]["interactive"]
    for side in part["sides"].values():
        assert "error" not in side
        assert [run["moment"] for run in side["runs"]] == list(MOMENTS[:1])
        median = side["median"]
        assert 0 < median["alone"] < median["behind"] and median["freed"] > 0
        assert median["ratio"] > 1 and median["peak_rows_bytes"] > 0 and "decode_tps" not in median
    assert set(part["sides"]) == {"mlxrun", "mlx-lm"} and part["same_tokens"] == 1.0
    assert "TTFT of one that comes behind a long prompt" in result.output
