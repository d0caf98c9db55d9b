"""`mlxrun bench engine`: the work it asks for, its arithmetic, its report, and a real run in small."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxrun.cli.bench.engine import benchmark
from mlxrun.cli.bench.engine.benchmark import BenchMeter, alternate, measure_workload, summarize_workload
from mlxrun.cli.bench.engine.measurement import (
    RequestOutput,
    Trace,
    compute_agreement,
    compute_medians,
    compute_metrics,
    compute_percentile,
    compute_ratios,
    run_workload,
)
from mlxrun.cli.bench.engine.mlxrun_contender import MlxrunContender
from mlxrun.cli.bench.engine.workloads import (
    STAGGERED_BEFORE,
    WORKLOADS,
    BenchRequest,
    RequestWorkload,
    make_workload,
)
from mlxrun.cli.bench.models import PRESETS, describe_model, open_model
from mlxrun.cli.commands.bench import command
from mlxrun.cli.main import main
from mlxrun.core.errors import ConfigError, MlxrunError, RequestError
from mlxrun.core.request import FinishReason, Request, TokenEvent
from tests.helpers.command_processes import run_program

VOCAB = 100


class FakeContender:
    """One token for every row a step, after `prefill` steps that give nothing; a step takes a second."""

    def __init__(self, prefill: int = 1, lose: int = 0) -> None:
        self.now = 0.0
        self.closed = False
        self.added: list[tuple[float, list[str]]] = []
        self._prefill, self._lose = prefill, lose
        self._left: dict[str, int] = {}
        self._wait: dict[str, int] = {}

    @property
    def decoding(self) -> int:
        return sum(self._wait[j] < 0 for j in self._left)

    def add(self, jobs: Sequence[BenchRequest]) -> None:
        self.added.append((self.now, [job.id for job in jobs]))
        for job in jobs:
            self._left[job.id] = job.output - self._lose
            self._wait[job.id] = self._prefill

    def step(self) -> list[RequestOutput]:
        self.now += 1.0
        outputs = []
        for job_id in list(self._left):
            self._wait[job_id] -= 1
            if self._wait[job_id] < 0:
                self._left[job_id] -= 1
                outputs.append(RequestOutput(job_id, (7,), self._left[job_id] <= 0))
                if self._left[job_id] <= 0:
                    del self._left[job_id]
        return outputs

    def close(self) -> None:
        self.closed = True


def run(contender: FakeContender, workload: RequestWorkload) -> Trace:
    return run_workload(contender, workload, lambda: contender.now)


# -- workloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_every_time_and_stays_below_the_vocabulary(name: str) -> None:
    one, two = (make_workload(name, 0.1, VOCAB, seed=3) for _ in range(2))
    assert one == two
    assert one != make_workload(name, 0.1, VOCAB, seed=4)
    counts = {"few": 8, "single": 1, "interactive": 11}
    assert len({job.id for job in one.requests}) == len(one.requests) == counts.get(name, 32)
    assert all(0 <= token < VOCAB for job in one.requests for token in job.prompt)
    assert [job.arrival for job in one.requests] == sorted(job.arrival for job in one.requests)


def test_the_shapes_are_those_that_the_goals_speak_of() -> None:
    """Issue 2, item 8."""
    lengths = {
        name: sorted(len(j.prompt) for j in make_workload(name, 1.0, VOCAB).requests) for name in WORKLOADS
    }
    assert lengths["uniform"] == [512] * 32
    assert lengths["ragged"] == [256] * 31 + [16384]
    assert lengths["mixed"] == [512] * 20 + [2048] * 8 + [8192] * 4
    assert lengths["staggered"] == [256] * 31 + [16384]
    assert lengths["shared"] == [16384 + 64] * 32
    assert {j.output for j in make_workload("ragged", 1.0, VOCAB).requests} == {128}


def test_prompts_share_a_beginning_and_differ_behind_it() -> None:
    prompts = [job.prompt for job in make_workload("shared", 0.1, VOCAB).requests]
    assert len({prompt[:1638] for prompt in prompts}) == 1
    assert len({prompt[1638:] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("scale", [0.01, 0.05, 0.3, 1.0, 2.0])
def test_the_long_prompt_arrives_while_sixteen_rows_decode(scale: float) -> None:
    workload = make_workload("staggered", scale, VOCAB)
    assert workload.long_id is not None
    long = workload.find_request(workload.long_id)
    assert len(long.prompt) == max(len(job.prompt) for job in workload.requests)
    seen: dict[str, int] = {}

    class Watch(FakeContender):
        def add(self, jobs: Sequence[BenchRequest]) -> None:
            seen.update({job.id: self.decoding for job in jobs})
            super().add(jobs)

    run(Watch(prefill=1), workload)
    assert seen[long.id] == STAGGERED_BEFORE


def test_scale_shortens_prompts_and_answers_but_leaves_time_to_decode_together() -> None:
    small = make_workload("ragged", 0.02, VOCAB)
    assert max(len(j.prompt) for j in small.requests) == 328
    assert min(j.output for j in small.requests) == 24


# -- driving and arithmetic -------------------------------------------------------------------------


def test_arrivals_count_steps_that_gave_tokens_and_idle_time_is_skipped() -> None:
    jobs = (
        BenchRequest("a", (1,), 3),
        BenchRequest("b", (1,), 1, arrival=1),
        BenchRequest("c", (1,), 1, arrival=50),
    )
    contender = FakeContender(prefill=2)
    trace = run(contender, RequestWorkload("w", jobs))
    # a: two steps of prefill, first token at 3 = tick 1; b comes in then; c as soon as nothing is left.
    assert contender.added == [(0.0, ["a"]), (3.0, ["b"]), (6.0, ["c"])]
    assert trace.times == {"a": [3.0, 4.0, 5.0], "b": [6.0], "c": [9.0]}


def test_a_job_with_missing_tokens_is_an_error_not_a_number() -> None:
    workload = RequestWorkload("w", (BenchRequest("a", (1,), 5),))
    with pytest.raises(MlxrunError, match="a got 4 tokens instead of 5"):
        run(FakeContender(lose=1), workload)


def test_metrics_by_hand() -> None:
    jobs = (
        BenchRequest("a", (1,) * 10, 4),
        BenchRequest("b", (1,) * 20, 3),
        BenchRequest("long", (1,) * 30, 2),
    )
    trace = Trace(
        start=10.0,
        added={"a": 10.0, "b": 10.0, "long": 12.0},
        times={"a": [11.0, 12.0, 14.0, 15.0], "b": [12.0, 13.0, 16.0], "long": [14.0, 18.0]},
        tokens={"a": [1] * 4, "b": [1] * 3, "long": [1] * 2},
    )
    got = compute_metrics(trace, RequestWorkload("w", jobs, long_id="long"))
    assert got["wall_s"] == 8.0
    assert got["output_tps"] == 9 / 8
    assert got["prefill_tps"] == 60 / 4
    # All three decode from 14 (the last first token) to 15 (the first last token): one token came in between.
    assert got["decode_tps"] == 1.0
    assert got["ttft_mean_s"] == pytest.approx((1 + 2 + 2) / 3)
    assert (got["ttft_p99_s"], got["gap_p50_s"], got["gap_p99_s"]) == (2.0, 1.0, 4.0)
    # Gaps that end in (12, 14]: a's 12 -> 14 and b's 12 -> 13.
    assert got["long_gap_p99_s"] == 2.0


def test_rows_that_never_decode_together_have_no_steady_rate() -> None:
    trace = Trace(0.0, {"a": 0.0, "b": 0.0}, {"a": [1.0, 2.0], "b": [2.0, 3.0]}, {"a": [1, 1], "b": [1, 1]})
    workload = RequestWorkload("w", (BenchRequest("a", (1,), 2), BenchRequest("b", (1,), 2)))
    assert compute_metrics(trace, workload)["decode_tps"] is None
    assert compute_metrics(trace, workload)["long_gap_p99_s"] is None


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([3.0], 99, 3.0), ([4.0, 1.0, 3.0, 2.0], 50, 2.0), (list(range(1, 101)), 99, 99)],
)
def test_percentile_is_nearest_rank(values: list[float], percent: int, expected: float | None) -> None:
    assert compute_percentile(values, percent) == expected


def test_ratios_say_how_many_times_better_ours_is() -> None:
    ours = {"wall_s": 2.0, "decode_tps": 30.0, "peak_bytes": 10.0, "gap_p50_s": None}
    peer = {"wall_s": 16.0, "decode_tps": 3.0, "peak_bytes": 5.0, "gap_p50_s": 1.0}
    got = compute_ratios(ours, peer)
    assert (got["wall_s"], got["decode_tps"], got["peak_bytes"]) == (8.0, 10.0, 0.5)
    assert got["gap_p50_s"] is None and "output_tps" not in got


def test_medians_need_every_run() -> None:
    runs: list[dict[str, float | None]] = [
        {"wall_s": w, "decode_tps": d} for w, d in [(1, 1), (9, None), (2, 2)]
    ]
    assert compute_medians(runs)["wall_s"] == 2
    assert compute_medians(runs)["decode_tps"] is None


def test_agreement_counts_answers_with_the_same_tokens() -> None:
    ours = Trace(0.0, tokens={"a": [1, 2], "b": [1, 2]})
    peer = Trace(0.0, tokens={"a": [1, 2], "b": [1, 3]})
    assert compute_agreement(ours, peer) == 0.5


# -- turns and report -------------------------------------------------------------------------------


def fake_sides(repeat: int) -> tuple[list[FakeContender], list[str], dict[str, Any]]:
    """Two sides on one clock and one memory: weights 100 and 200 bytes, 30 and 60 while running."""
    opened: list[FakeContender] = []
    names: list[str] = []
    state = {"alive": 5, "peak": 0}
    workload = make_workload("uniform", 0.01, VOCAB)

    class Side(FakeContender):
        def __init__(self, name: str, weights: int, prefill: int) -> None:
            super().__init__(prefill)
            self._rows, self._weights = weights * 3 // 10, weights
            state["alive"] += weights
            opened.append(self)
            names.append(name)

        def step(self) -> list[RequestOutput]:
            state["peak"] = state["alive"] + self._rows
            return super().step()

        def close(self) -> None:
            state["alive"] -= self._weights
            super().close()

    def settle(drop_pool: bool) -> int:
        state["peak"] = state["alive"]
        return state["alive"]

    openers = {"mlxrun": lambda: Side("mlxrun", 100, 1), "mlx-lm": lambda: Side("mlx-lm", 200, 4)}
    meter = BenchMeter(lambda: opened[-1].now, settle, lambda: state["peak"], lambda: 0)
    said: list[str] = []
    sides = measure_workload(workload, openers, repeat, meter, said.append)
    turns = [f"{workload.name} {name} {i // 2 + 1}/{repeat}" for i, name in enumerate(names)]
    assert [line.partition(": ")[0] for line in said] == [turn for turn in turns for _ in range(3)]
    phases = [line.partition(": ")[2].partition(" ")[0] for line in said[:2]]
    assert phases == ["loading", "running,"] and "mlxrun took 0 s" in said[3] and "--no-peer" in said[3]
    return opened, names, summarize_workload(workload, sides)


def test_sides_take_turns_and_each_pays_for_its_own_memory_alone() -> None:
    opened, names, part = fake_sides(3)
    assert (
        names
        == ["mlxrun", "mlx-lm", "mlx-lm", "mlxrun", "mlxrun", "mlx-lm"]
        == list(alternate(["mlxrun", "mlx-lm"], 3))
    )
    assert all(contender.closed for contender in opened)
    ours, peer = part["sides"]["mlxrun"]["median"], part["sides"]["mlx-lm"]["median"]
    assert (ours["peak_bytes"], ours["peak_rows_bytes"]) == (130, 30)
    assert (peer["peak_bytes"], peer["peak_rows_bytes"]) == (260, 60)
    assert part["ratio"]["peak_bytes"] == 2.0
    assert part["ratio"]["ttft_mean_s"] == 2.5  # 5 seconds against 2
    assert part["same_tokens"] == 1.0


# -- our side ---------------------------------------------------------------------------------------


class FakeEngine:
    """Scripted events; records its requests."""

    def __init__(self, steps: list[list[TokenEvent]]) -> None:
        self.requests: list[Request] = []
        self._steps = steps

    @property
    def busy(self) -> bool:
        return bool(self._steps)

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def step(self) -> list[TokenEvent]:
        return self._steps.pop(0)


def test_our_engine_is_asked_for_greedy_answers_of_a_fixed_length() -> None:
    progress = TokenEvent("a", num_computed_tokens=1)
    last = TokenEvent("a", (5,), finish=FinishReason.LENGTH)
    engine = FakeEngine([[progress], [TokenEvent("a", (4,))], [last]])
    trace = run_workload(
        MlxrunContender(engine), RequestWorkload("w", (BenchRequest("a", (1, 2), 2),)), lambda: 0.0
    )
    assert trace.tokens == {"a": [4, 5]}
    params = engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.stop_ids) == (2, 0.0, frozenset())


def test_a_failed_request_and_a_stuck_engine_end_the_benchmark() -> None:
    workload = RequestWorkload("w", (BenchRequest("a", (1, 2), 2),))
    broken = TokenEvent("a", finish=FinishReason.ERROR, error=RequestError("no room"))
    with pytest.raises(RequestError, match="no room"):
        run_workload(MlxrunContender(FakeEngine([[broken]])), workload, lambda: 0.0)
    with pytest.raises(MlxrunError, match="idle"):
        run_workload(MlxrunContender(FakeEngine([])), workload, lambda: 0.0)


# -- models and the command -------------------------------------------------------------------------


def test_a_model_is_a_preset_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiny, qwen3-0\.6b"), open_model("nope"):
        pass
    config = {"text_config": {"vocab_size": 9, "dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (describe_model("m", tmp_path).vocab, describe_model("m", tmp_path).dtype) == (9, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4}}))
    assert describe_model("m", tmp_path).dtype is None


def test_the_big_preset_has_the_real_shape() -> None:
    """Issue 2: qwen3-0.6b bf16, as Qwen3-0.6B's own config.json."""
    shape = PRESETS["qwen3-0.6b"]
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [shape[k] for k in keys] == [28, 1024, 16, 8, 128]
    assert (shape["intermediate_size"], shape["vocab_size"], shape["tie_word_embeddings"]) == (
        3072,
        151936,
        True,
    )


def test_a_wrong_option_is_a_usage_error() -> None:
    runner = CliRunner()
    assert runner.invoke(command, ["engine", "--workload", "nope"]).exit_code == 2
    assert runner.invoke(command, ["engine", "--scale", "0"]).exit_code == 2
    assert "ragged" in runner.invoke(command, ["engine", "--help"]).output


def test_help_needs_no_mlx() -> None:
    """Design 2: `--help` imports neither mlx nor transformers."""
    code = (
        "import sys; from click.testing import CliRunner; from mlxrun.cli.commands.bench import command\n"
        "assert CliRunner().invoke(command, ['engine', '--help']).exit_code == 0\n"
        "print([m for m in ('mlx', 'mlx.core', 'transformers', 'rich') if m in sys.modules])"
    )
    out = run_program([sys.executable, "-c", code], check=True)
    assert out.stdout.strip() == "[]"


def test_both_sides_run_for_real(tmp_path: Path) -> None:
    """The tiny preset in small: two workloads, both engines, JSON and table."""
    path = tmp_path / "bench.json"
    args = ["engine", "--scale", "0.01", "--repeat", "1", "--workload", "ragged", "--workload", "staggered"]
    result = CliRunner().invoke(command, [*args, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(path.read_text())
    origin = {"date", "command", "machine", "versions"}
    assert set(report) == origin | {"format", "device", "model", "settings", "workloads"}
    assert list(report["workloads"]) == ["ragged", "staggered"]
    for part in report["workloads"].values():
        assert set(part["sides"]) == {"mlxrun", "mlx-lm"}
        for side in part["sides"].values():
            assert side["median"]["decode_tps"] > 0 and side["median"]["peak_rows_bytes"] > 0
        assert part["same_tokens"] == 1.0  # float32: both compute the same
    chunk = report["workloads"]["staggered"]["chunk"]
    assert chunk["tokens"] == 164 and chunk["seconds"] > 0 and chunk["p99_in_chunks"]["mlxrun"] > 0
    assert "| ragged" in result.output


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_an_interrupt_leaves_what_was_measured(
    turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After so many turns of two workloads: a table and a JSON that say so, exit 130."""
    left = [turns]

    def make_openers(*_: object) -> dict[str, Any]:
        def open_one() -> MlxrunContender | FakeContender:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return FakeContender()

        return {"mlxrun": open_one, "mlx-lm": open_one}

    monkeypatch.setattr(benchmark, "make_openers", make_openers)
    path = tmp_path / "bench.json"
    args = ["--repeat", "1", "--scale", "0.01", "--workload", "single", "--workload", "few"]
    assert main(["bench", "engine", *args, "--json", str(path)]) == 130
    shown = capsys.readouterr()
    assert "interrupted" in shown.err and path.exists() is ("INCOMPLETE" in shown.out) is (turns > 0)
    if turns:
        report = json.loads(path.read_text())
        sides = [name for part in report["workloads"].values() for name in part["sides"]]
        assert report["incomplete"] and sides == ["mlxrun", "mlx-lm", "mlxrun"][:turns]
