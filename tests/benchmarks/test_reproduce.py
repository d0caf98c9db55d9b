"""The reproducibility benchmark: equal bytes under every condition, and twins that it finds out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import command
from benchmarks.reproduce.answers import count_differences, read_records, strip_ids
from benchmarks.reproduce.benchmark import CONDITIONS, IN_PROCESS, PREEMPTED, is_proven
from benchmarks.reproduce.lines import LineWriter, shuffle_lines
from benchmarks.reproduce.models import FAMILIES
from benchmarks.reproduce.processes import make_environment
from benchmarks.reproduce.report import format_report
from benchmarks.reproduce.twins import AS_PROMPT, OTHER_THREADS, PREEMPTED_TWINS, list_twins
from mlxrun.cli.main import main
from mlxrun.core.errors import MlxrunError
from tests.helpers.command_processes import run_program

LINES = 16
IN_COMPANY = [name for name in IN_PROCESS if name != PREEMPTED]
ROOT = Path(__file__).parents[2]


def run(*arguments: str, path: Path) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; its exit code and its report."""
    code = main(["reproduce", *arguments, "--json", str(path)], command, "benchmarks")
    return code, json.loads(path.read_text())


def check(code: int, report: dict[str, Any], lines: int) -> None:
    """Every condition gave the oracle's bytes, and a model found out each twin; rounding decides which."""
    assert code == 0 and is_proven(report)
    for model in report["models"]:
        assert model["bytes"] > 100 * lines
        for name, found in model["conditions"].items():
            counted = max(lines // 4, 16) if name == PREEMPTED else lines
            assert (found["lines"], found["differing"], found["bytes"]) == (counted, 0, 0), name


def choose_conditions(*names: str) -> list[str]:
    return [part for name in names for part in ("--condition", name)]


def test_the_same_bytes_together_shuffled_and_warm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small part, on one family; `pytest -m sweep` has all."""
    conditions = choose_conditions(*IN_COMPANY)
    code, report = run("--lines", str(LINES), "--family", "windowed", *conditions, path=tmp_path / "r.json")
    check(code, report, LINES)
    found = report["models"][0]["conditions"]
    assert list(found) == list(IN_COMPANY)
    assert re.fullmatch(r"\d\d% reused", found["warm memory"]["note"])
    out = capsys.readouterr().out
    assert "| alone | 0 |" in out and "No byte differs, " in out


@pytest.mark.sweep  # in each run tests/parity/test_reproducible.py has preempted rows
def test_the_same_bytes_after_preemptions(tmp_path: Path) -> None:
    """Memory is so short that rows are preempted; a twin that computes their answers as prompts is tried."""
    arguments = ("--lines", "64", "--family", "plain", *choose_conditions(PREEMPTED))
    code, report = run(*arguments, path=tmp_path / "r.json")
    check(code, report, 64)
    (model,) = report["models"]
    assert re.fullmatch(r"\d+ preemptions? in 16 lines", model["conditions"][PREEMPTED]["note"])
    assert AS_PROMPT in model["twins"]


@pytest.mark.sweep
def test_the_same_bytes_under_all_conditions(tmp_path: Path) -> None:
    """Every family, as `make reproduce` runs it, whatever the environment of the tests says of BLAS."""
    environment = make_environment(None)
    environment.pop("OPENBLAS_CORETYPE", None)
    path = tmp_path / "r.json"
    arguments = f"--lines 64 --json {path}"
    done = run_program(
        ["make", "reproduce", f"REPRODUCE_ARGS={arguments}"], seconds=3600.0, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    check(0, report, 64)
    assert [model["name"] for model in report["models"]] == list(FAMILIES)
    assert all(list(model["conditions"]) == list(CONDITIONS) for model in report["models"])
    assert not report["is_partial"]


def make_report(bytes_differing: int = 0, twin: int = 5) -> dict[str, Any]:
    found = {"lines": 9, "differing": bool(bytes_differing), "bytes": bytes_differing, "note": ""}
    killed = {"lines": 9, "differing": 0, "bytes": 0, "note": "10 kills"}
    twins = {
        name: {"lines": 9, "differing": twin, "bytes": 1, "note": ""}
        for name in (*list_twins(), *PREEMPTED_TWINS)
    }
    conditions = {"alone": found, "killed": killed}
    model = {"name": "m", "title": "model", "bytes": 9000, "conditions": conditions, "twins": twins}
    device = {"name": "CPU", "backend": "cpu"}
    rest = {"versions": {"mlx": "1.0"}, "device": device, "seconds": 3}
    return {"lines": 9, "is_partial": False, "models": [model], **rest}


def test_a_byte_that_differs_fails_the_benchmark() -> None:
    assert is_proven(make_report())
    assert not is_proven(make_report(bytes_differing=2))
    assert not is_proven(make_report(twin=0))  # a test that finds no fault proves nothing
    text = "\n".join(format_report(make_report(bytes_differing=2)))
    assert "| alone | **2** in 1 lines |" in text and "| killed (10 kills) | 0 |" in text
    assert text.endswith("NOT REPRODUCIBLE.")


@pytest.mark.parametrize("is_partial", [True, False])
def test_a_part_of_the_models_may_hide_a_fault_but_not_all(is_partial: bool) -> None:
    report = make_report() | {"is_partial": is_partial}
    twins = report["models"][0]["twins"]
    names = list(twins)
    twins[names[0]]["differing"] = 0
    assert is_proven(report) is is_partial
    assert f"with this fault: {names[0]}." in "\n".join(format_report(report))
    for name in names:
        twins[name]["differing"] = 0
    assert not is_proven(report)


def test_bytes_are_counted() -> None:
    oracle = {"a": b"12345", "b": b"1", "c": b"x"}
    found = count_differences(oracle, {"a": b"12x45", "b": b"123", "c": b"x"}, "note")
    assert (found.lines, found.differing, found.bytes, found.note) == (3, 2, 3, "note")
    with pytest.raises(MlxrunError, match="1 are on one side only, such as c"):
        count_differences(oracle, {"a": b"", "b": b""})


def test_answers_of_a_batch_are_compared_without_their_ids(tmp_path: Path) -> None:
    usage = {"completion_tokens": 3}
    body = {"id": "1", "created": 0, "choices": [1], "usage": usage}
    other = {"id": "2", "created": 9, "choices": [1], "usage": usage | {"prompt_tokens_details": {}}}
    lines = [json.dumps({"custom_id": "a", "response": {"body": each}}) for each in (body, other)]
    for line in lines:
        (tmp_path / "out.jsonl").write_text(line + "\n")
        assert strip_ids(read_records(tmp_path / "out.jsonl")) == {
            "a": json.dumps({"choices": [1], "usage": usage}).encode()
        }
    (tmp_path / "out.jsonl").write_text("\n".join([lines[0], lines[0]]))
    with pytest.raises(MlxrunError, match="a line was answered twice"):
        read_records(tmp_path / "out.jsonl")


@pytest.mark.parametrize("is_chat", [True, False])
def test_lines_are_requests_of_every_kind(tmp_path: Path, is_chat: bool) -> None:
    """The same each time, and shuffled the same lines."""
    writer, path = LineWriter(is_chat=is_chat, images=is_chat), tmp_path / "job.jsonl"
    lines = writer.write(path, 64)
    assert writer.write(path, 64) == lines and path.read_text().splitlines() == lines
    bodies = [json.loads(line)["body"] for line in lines]
    fields = {field for body in bodies for field in body}
    assert {"seed", "temperature", "logprobs", "prompt_logprobs", "n", "response_format"} <= fields
    assert ("messages" in fields) is is_chat and ("image_url" in path.read_text()) is is_chat
    shuffle_lines(path, lines)
    mixed = path.read_text().splitlines()
    assert mixed != lines and sorted(mixed) == sorted(lines)


def test_another_model_has_to_be_a_model(tmp_path: Path) -> None:
    assert main(["reproduce", "--model", str(tmp_path)], command, "benchmarks") == 2
    assert main(["reproduce", "--lines", "3"], command, "benchmarks") == 2


def test_environments_differ_in_their_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "9")
    monkeypatch.setenv("SOMETHING", "else")
    assert not {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & make_environment(None).keys()
    found = make_environment(4)
    assert (found["OPENBLAS_NUM_THREADS"], found["OMP_NUM_THREADS"], found["SOMETHING"]) == ("4", "4", "else")


def test_a_twin_has_a_machine_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenBLAS there are no threads to differ in."""
    monkeypatch.setattr("mlxrun.model.machine.device.get_backend", lambda: "cpu")
    monkeypatch.setattr("mlxrun.model.machine.blas.find_loaded_blas", lambda: "libopenblas.so")
    assert OTHER_THREADS in list_twins() and AS_PROMPT in PREEMPTED_TWINS
    monkeypatch.setattr("mlxrun.model.machine.blas.find_loaded_blas", lambda: None)
    assert OTHER_THREADS not in list_twins()


def test_lines_with_longer_answers_are_the_same_requests(tmp_path: Path) -> None:
    short, long = (LineWriter(more_tokens=more).write(tmp_path / "job.jsonl", 16) for more in (0, 40))
    for was, now in zip(short, long, strict=True):
        old, new = json.loads(was)["body"], json.loads(now)["body"]
        assert new["max_tokens"] == old["max_tokens"] + 40
        least = None if "response_format" in old else new["max_tokens"]
        assert new.pop("min_tokens", None) == least
        assert old == new | {"max_tokens": old["max_tokens"]}
