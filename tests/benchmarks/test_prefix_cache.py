"""`python -m benchmarks prefix-cache`: its scripts, its arithmetic, its report, and every scenario for real
in small."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.__main__ import FAMILIES, command
from benchmarks.prefix_cache.benchmark import CachePlan, compare_without_reuse, measure_rounds
from benchmarks.prefix_cache.lookup import measure_lookup
from benchmarks.prefix_cache.measurement import (
    ServedCase,
    SideAnswer,
    compute_numbers,
    compute_same_share,
    count_shared,
    run_script,
    summarize_rounds,
)
from benchmarks.prefix_cache.models import list_families
from benchmarks.prefix_cache.report import print_cache_report
from benchmarks.prefix_cache.workloads import (
    SCENARIOS,
    SCRIPTS,
    TURNS,
    PromptCase,
    Script,
    make_distinct,
    make_script,
)
from mlxrun.cli.bench.engine.measurement import RequestOutput
from mlxrun.cli.bench.engine.workloads import BenchRequest
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError

VOCAB = 1000


class FakeSide:
    """Answers with the prompt's sum; remembers prompts, and reuses what `shared` says."""

    def __init__(self, keep: bool = True) -> None:
        self.served: list[PromptCase] = []
        self.cleared: list[int] = []
        self.closed = False
        self._keep = keep
        self._known: list[tuple[int, ...]] = []

    def serve(self, case: PromptCase) -> SideAnswer:
        self.served.append(case)
        cached = count_shared(case.prompt, self._known)
        tokens = tuple((sum(case.prompt) + i) % VOCAB for i in range(case.output))
        if self._keep:
            self._known.append(case.prompt + tokens)
        held = sum(len(known) for known in self._known)
        return SideAnswer(tokens, float(len(case.prompt) - cached), cached, "lcp" if cached else "miss", held)

    def clear_cache(self) -> None:
        self.cleared.append(len(self.served))
        self._known.clear()

    def close(self) -> None:
        self.closed = True


def played(name: str, scale: float = 1.0, seed: str = "0") -> list[ServedCase]:
    return run_script(FakeSide(), make_script(name, scale, VOCAB, seed))


# -- scripts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_asks_the_same_every_time_and_other_tokens_for_another_seed(name: str) -> None:
    one, two, other = (
        [r.case for r in run_script(FakeSide(), make_script(name, 0.1, VOCAB, s))] for s in ("1", "1", "2")
    )
    assert one == two
    assert [len(a.prompt) for a in one] == [len(a.prompt) for a in other]
    assert all(a.prompt[:4] != b.prompt[:4] for a, b in zip(one, other, strict=True))
    assert one[0].clear_before
    for case in one:
        assert list(case.cache_positions) == sorted(set(case.cache_positions))
        assert all(0 < at < len(case.prompt) for at in case.cache_positions)


@pytest.mark.parametrize(
    ("name", "roles", "prompt", "common"),
    [
        ("repeat", ["cold", "warm"], 16384, 16383),
        ("shared-2k", ["cold"] + ["warm"] * 3, 2304, 2048),
        ("shared-16k", ["cold"] + ["warm"] * 3, 16640, 16384),
        ("alternating", ["cold"] * 2 + ["warm"] * 6, 4160, 4096),
    ],
)
def test_the_scripts_are_those_that_the_goals_speak_of(
    name: str, roles: list[str], prompt: int, common: int
) -> None:
    records = played(name)
    assert [r.case.role for r in records] == roles
    assert {len(r.case.prompt) for r in records} == {prompt}
    # Random tokens may agree by chance where the shared part ends.
    warm = [r.shared for r in records if r.case.role == "warm"]
    assert all(common <= n <= common + 3 for n in warm)
    assert [r.shared <= 3 for r in records if r.case.role == "cold"] == [True] * roles.count("cold")


def test_a_conversation_grows_by_its_answers_and_ends_with_its_yardsticks() -> None:
    records = played("conversation")
    turns, (cold, alone) = records[:TURNS], records[TURNS:]
    assert [r.case.role for r in turns] == ["first"] + ["warm"] * 9
    for before, after in zip(turns, turns[1:], strict=False):
        past = before.case.prompt + before.answer.tokens
        assert after.case.prompt[: len(past)] == past
        assert after.case.cache_positions == (4096, len(past))
        assert len(after.case.prompt) - len(past) == 700
        assert after.shared >= len(past)
    warm = sorted(len(r.case.prompt) for r in turns[1:])
    assert (cold.case.role, len(cold.case.prompt)) == ("cold", warm[4])
    assert (alone.case.role, len(alone.case.prompt), alone.case.clear_before) == ("alone", warm[-1], True)
    assert alone.case.cache_positions == turns[-1].case.cache_positions
    assert cold.shared <= 3 and alone.shared == 0


def test_distinct_prompts_share_nothing() -> None:
    work = make_distinct(1.0, VOCAB, "0")
    assert [(len(j.prompt), j.output) for j in work.requests] == [(512, 32)] * 32
    assert len({j.prompt[:8] for j in [*work.requests, *make_distinct(1.0, VOCAB, "1").requests]}) == 64


# -- playing and arithmetic -------------------------------------------------------------------------


def test_shared_is_what_a_perfect_cache_would_not_compute() -> None:
    assert count_shared((1, 2, 3, 4), []) == 0
    assert count_shared((1, 2, 3, 4), [(1, 9), (1, 2, 3, 9)]) == 3
    assert count_shared((1, 2, 3, 4), [(1, 2)]) == 2
    assert count_shared((1, 2, 3, 4), [(1, 2, 3, 4, 5)]) == 3


def test_a_fresh_ask_comes_after_the_cache_was_emptied() -> None:
    side = FakeSide()
    run_script(side, make_script("conversation", 0.1, VOCAB, "0"))
    assert side.cleared == [0, TURNS + 1]


def test_a_stop_iteration_of_a_side_is_not_taken_for_the_end() -> None:
    class Broken(FakeSide):
        def serve(self, case: PromptCase) -> SideAnswer:
            raise StopIteration

    with pytest.raises(StopIteration):
        run_script(Broken(), make_script("repeat", 0.1, VOCAB, "0"))


def test_numbers_by_hand() -> None:
    def record(role: Any, tokens: int, ttft: float, cached: int, common: int, held: int) -> ServedCase:
        answer = SideAnswer((1,), ttft, cached, "prefix", held, tower_calls=0)
        return ServedCase(PromptCase(role, (0,) * tokens, 1), answer, common)

    records = [
        record("first", 10, 9.0, 0, 0, 5),
        record("warm", 20, 2.0, 10, 10, 10),
        record("warm", 30, 4.0, 18, 20, 12),
        record("cold", 25, 12.0, 0, 0, 99),
        record("alone", 30, 7.0, 0, 0, 10),
    ]
    got = compute_numbers(records)
    assert (got["ttft_cold_s"], got["ttft_warm_s"], got["times"]) == (12.0, 3.0, 4.0)
    assert (got["prompt_tokens"], got["reused_tokens"], got["prefilled_tokens"]) == (25, 14, 11)
    assert got["reused_share"] == pytest.approx(28 / 30)
    assert (got["cache_bytes"], got["growth"], got["tower_calls"]) == (12, 1.2, 0)


def test_sides_take_turns_after_a_round_that_does_not_count() -> None:
    log: list[tuple[str, str]] = []
    sides = {"a": FakeSide(), "b": FakeSide()}

    def scripts(name: str, seed: str) -> Iterator[PromptCase]:
        log.append((name, seed))
        return make_script(name, 0.01, VOCAB, seed)

    rounds = measure_rounds("repeat", sides, scripts, 2, lambda line: None)  # type: ignore[arg-type]
    assert log == [("repeat", s) for s in ("warm-up", "warm-up", "1", "1", "2", "2")]
    assert {name: len(r) for name, r in rounds.items()} == {"a": 2, "b": 2}
    assert all(len(side.served) == 6 for side in sides.values())
    got = summarize_rounds(rounds["a"])
    assert got["hits"] == {"lcp": 2} and got["median"]["reused_share"] == 1.0
    assert got["median"]["tower_calls"] is None and got["median"]["growth"] is None


def test_a_warm_answer_is_compared_with_one_of_a_side_that_keeps_nothing() -> None:
    records = played("shared-2k", 0.1)
    assert compute_same_share(FakeSide(keep=False), records) == 1.0

    class Wrong(FakeSide):
        def serve(self, case: PromptCase) -> SideAnswer:
            return SideAnswer((0,), 1.0, 0)

    assert compute_same_share(Wrong(), records) == 0.0


class Timed:
    """One token for every row a step; a step takes `seconds`."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.seen: list[str] = []
        self._clock, self._seconds = clock, seconds
        self._left: dict[str, int] = {}

    def add(self, jobs: Any) -> None:
        self._left.update({job.id: job.output for job in jobs})
        self.seen += [job.id for job in jobs]

    def step(self) -> list[RequestOutput]:
        self._clock[0] += self._seconds
        self._left = {name: left - 1 for name, left in self._left.items()}
        out = [RequestOutput(name, (1,), left == 0) for name, left in self._left.items()]
        self._left = {name: left for name, left in self._left.items() if left}
        return out

    def close(self) -> None:
        pass


def test_what_the_cache_costs_is_the_median_over_neighbours() -> None:
    clock = [0.0]
    engines = {"on": Timed(clock, 1.25), "off": Timed(clock, 1.0)}
    plan = CachePlan("tiny", ("plain",), ("nothing",), Config(), scale=0.1, repeat=2)
    got = compare_without_reuse(engines, plan, VOCAB, lambda line: None, lambda: clock[0])
    assert got["ratio"] == pytest.approx(0.8)
    assert {name: len(r) for name, r in got["runs"].items()} == {"on": 4, "off": 4}
    assert all(len(set(e.seen)) == len(e.seen) == 5 * 32 for e in engines.values())
    assert isinstance(make_distinct(0.1, VOCAB, "0").requests[0], BenchRequest)


# -- report -----------------------------------------------------------------------------------------


def fake_report() -> dict[str, Any]:
    def script(seed: str) -> Script:
        return make_script("conversation", 0.05, VOCAB, seed)

    sides = {
        name: summarize_rounds([run_script(FakeSide(), script(str(i))) for i in range(2)])
        | {"same_tokens": 1.0}
        for name in ("mlxrun", "mlx-lm")
    }
    nothing = {"runs": {}, "median": {"on": 990.0, "off": 1000.0}, "ratio": 0.99}
    part = {"model": "tiny", "dtype": "float32", "vocab": VOCAB}
    part |= {"scenarios": {"conversation": {"sides": sides}, "nothing": nothing}}
    row = {"records": 10, "found_s": 4e-4, "parted_s": 5e-4}
    return {
        "versions": {"mlxrun": "0.1"},
        "device": {"backend": "cpu", "name": "some CPU"},
        "settings": {"scale": 0.05, "repeat": 2},
        "families": {"plain": part},
        "lookup": {"tokens": 16384, "rows": [row]},
    }


def test_piped_the_tables_are_markdown() -> None:
    out = io.StringIO()
    print_cache_report(fake_report(), Console(file=out))
    tables = [line.strip() for line in out.getvalue().splitlines() if line.strip().startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in tables]
    assert [row[0] for row in cells if len(row) == 14] == ["family", cells[1][0], "plain", ""]
    assert cells[2][1:3] == ["conversation", "mlxrun"] and cells[3][1:3] == ["", "mlx-lm"]
    assert ["plain", "990 tok/s", "1,000 tok/s", "0.990"] in cells
    assert ["10", "400 us", "500 us"] in cells
    assert "some CPU" in out.getvalue() and "…" not in out.getvalue()


# -- the command ------------------------------------------------------------------------------------


def test_families_are_those_of_the_model(tmp_path: Path) -> None:
    assert list_families("tiny") == FAMILIES
    assert list_families("qwen3-0.6b") == ("plain",)
    assert list_families("embedded") == ("vision",)
    cases = {"layer_types": ["sliding_attention"]}, {"linear_num_key_heads": 2}, {"sliding_window": None}
    found = []
    for case in cases:
        (tmp_path / "config.json").write_text(json.dumps(case))
        found += list_families(str(tmp_path))
    assert found == ["windowed", "hybrid", "plain"]
    with pytest.raises(ConfigError, match=r"tiny, qwen3-0\.6b"):
        list_families("nope")


def test_wrong_options_are_usage_errors() -> None:
    runner = CliRunner()
    assert runner.invoke(command, ["prefix-cache", "--scenario", "nope"]).exit_code == 2
    wrong = runner.invoke(command, ["prefix-cache", "--model", "qwen3-0.6b", "--family", "hybrid"])
    assert wrong.exit_code == 2 and "is plain" in wrong.output
    text = runner.invoke(command, ["prefix-cache", "--help"]).output
    assert all(name in text for name in SCENARIOS)


def test_without_a_cache_there_is_nothing_to_measure() -> None:
    args = ["prefix-cache", "--scenario", "lookup", "--set", "cache.backend=none"]
    assert isinstance(CliRunner().invoke(command, args).exception, ConfigError)


def test_the_search_finds_what_is_there() -> None:
    got = measure_lookup(Config(), 0, lambda line: None, records=(10, 60))
    assert [row["records"] for row in got["rows"]] == [10, 60]
    for row in got["rows"]:
        assert row["found_tokens"] == 16384
        assert 100 <= row["parted_tokens"] <= 103
        assert row["found_s"] > 0


def run_real(tmp_path: Path, *args: str) -> dict[str, Any]:
    path = tmp_path / "bench.json"
    # A small grid, so that prompts of a hundred tokens have several chunks.
    small = ["--set", "scheduler.chunk=32", "--set", "cache.checkpoint_every=64"]
    options = ["prefix-cache", "--repeat", "1", "--json", str(path), *small, *args]
    result = CliRunner().invoke(command, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    report: dict[str, Any] = json.loads(path.read_text())
    origin = {"date", "command", "machine", "versions"}
    assert set(report) == origin | {"format", "device", "settings", "families", "lookup"}
    return report


# On a CPU recurrent layers are computed token by token: the shortest scripts, of which one repeats a prompt.
PLAYED = [
    pytest.param("plain", "--no-peer", list(SCRIPTS), marks=pytest.mark.slow),
    ("hybrid", "--peer", ["repeat", "shared-2k"]),
    *(
        pytest.param(family, peer, list(SCRIPTS), marks=pytest.mark.sweep)
        for family, peer in (("windowed", "--no-peer"), ("hybrid", "--peer"))
    ),
]


@pytest.mark.parametrize(("family", "peer", "scripts"), PLAYED)
def test_what_was_computed_is_reused_for_real(
    family: str, peer: str, scripts: list[str], tmp_path: Path
) -> None:
    played = [arg for name in scripts for arg in ("--scenario", name)]
    report = run_real(tmp_path, "--family", family, peer, "--scale", "0.02", *played)
    scenarios = report["families"][family]["scenarios"]
    assert list(scenarios) == scripts
    for name, part in scenarios.items():
        assert list(part["sides"]) == (["mlxrun", "mlx-lm"] if peer == "--peer" else ["mlxrun"])
        ours = part["sides"]["mlxrun"]
        assert ours["median"]["reused_share"] >= 0.98, name
        assert ours["median"]["cache_bytes"] > 0 and ours["median"]["times"] > 0
        assert "miss" not in ours["hits"]
        assert (ours["median"]["growth"] is not None) == (name == "conversation")
        for side in part["sides"].values():
            assert side["same_tokens"] == 1.0, name  # float32: a hit changes nothing


def test_the_same_image_is_not_seen_twice(tmp_path: Path) -> None:
    report = run_real(tmp_path, "--family", "vision", "--scale", "0.1", "--scenario", "image")
    ours = report["families"]["vision"]["scenarios"]["image"]["sides"]["mlxrun"]
    assert ours["median"]["tower_calls"] == 0
    assert ours["median"]["reused_share"] >= 0.98
    assert ours["same_tokens"] == 1.0


def test_distinct_prompts_are_measured_with_and_without_the_cache(tmp_path: Path) -> None:
    options = ["--family", "plain", "--scale", "0.05", "--scenario", "nothing", "--scenario", "lookup"]
    report = run_real(tmp_path, *options)
    part = report["families"]["plain"]["scenarios"]["nothing"]
    assert part["ratio"] > 0 and {name: len(r) for name, r in part["runs"].items()} == {"on": 2, "off": 2}
    assert len(report["lookup"]["rows"]) == 2
