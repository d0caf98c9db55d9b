"""`python -m benchmarks sweep`: its output, its exit code, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.__main__ import command
from benchmarks.sweep import sweep
from benchmarks.sweep.family import FamilyResult

STATUS = {"llama": "exact", "gemma2": "slower", "plamo3": "wrong"}


@pytest.fixture(autouse=True)
def fake_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_sweep(families: Sequence[tuple[str, str]], jobs: int) -> Iterator[FamilyResult]:
        for kind, family in families:
            yield FamilyResult(kind, family, STATUS[family], "why")  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "run_sweep", run_sweep)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["sweep", *arguments], standalone_mode=False)


def test_progress_and_summary() -> None:
    result = invoke("llama", "gemma2")
    assert result.return_value == 0
    assert result.stdout.splitlines() == [
        "1/2 text gemma2: exact by a slower way: why",
        "2/2 text llama: exact: why",
        "2 families: 1 exact, 1 exact by a slower way",
    ]


def test_results_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    """By their names and the versions of the libraries."""
    file = tmp_path / "results.jsonl"
    invoke("llama", "--resume", str(file))
    again = invoke("llama", "gemma2", "--resume", str(file), "--jobs", "2")
    assert again.stdout.splitlines() == [
        "2/2 text gemma2: exact by a slower way: why",
        "2 families: 1 exact, 1 exact by a slower way",
    ]
    file.write_text(file.read_text().replace('"mlx-lm": "', '"mlx-lm": "9'))
    assert invoke("llama", "--resume", str(file)).stdout.splitlines()[0] == "1/1 text llama: exact: why"


def test_a_wrong_family_is_exit_code_1() -> None:
    assert invoke("plamo3").return_value == 1


def test_json_and_markdown_leave_progress_to_stderr() -> None:
    result = invoke("llama", "--json")
    (family,) = json.loads(result.stdout)["families"]
    assert family["family"] == "llama" and family["status"] == "exact"
    assert "1/1 text llama" in result.stderr
    assert invoke("llama", "--markdown").stdout.startswith("# Models\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_family"], "no such family in the installed libraries: no_such_family"),
        (["llam"], "no such family in the installed libraries: llam; did you mean llama?"),
        (["llama", "--json", "--markdown"], "exclude each other"),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str) -> None:
    assert message in str(invoke(*arguments).exception)
