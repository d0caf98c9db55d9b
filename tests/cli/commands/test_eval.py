"""`mlxrun eval` as it is typed: what it prints where, exit codes, --dry-run, --only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.config.settings import Config
from mlxrun.core.errors import ModelLoadError
from mlxrun.evals.reports.page import render_markdown
from mlxrun.evals.reports.report_runs import read_runs
from tests.helpers.batch_fakes import FakeClient
from tests.helpers.suite_files import read_cells, write_suite
from tests.helpers.tokenizers import FakeModelInfo

pytestmark = pytest.mark.thorough

REPOSITORY = Path(__file__).parents[3]
SUITE = """
    models:
      tiny:
      other: {set: {model.path: org/other}}
    tasks:
      cities: {data: cities.csv, prompt: "{{ capital }}", expected: capital, match: contains, group: area}
      areas: {data: cities.csv, prompt: "{{ area }}", limit: 1}
"""


class Info(FakeModelInfo):
    """A model whose weights are a file of the test."""

    folder = Path(__file__).parent


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replaces model and engine; returns the configs that it was started with."""
    started: list[Config] = []

    async def start(config: Any, host: Any) -> FakeClient:
        started.append(config)
        if config.model.path == "org/broken":
            raise ModelLoadError("the weights are damaged")
        return FakeClient(FakeModelInfo())

    # The engine first: a module that is imported for it keeps the real function.
    monkeypatch.setattr("mlxrun.engine.client.EngineClient.start", start)
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", lambda settings, **_: Info())
    monkeypatch.setattr("mlxrun.model.machine.device.describe_device", lambda settings: {"name": "fake"})
    return started


def test_a_suite(
    tmp_path: Path,
    fake_engine: list[Config],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The matrix is on stdout, a line for each cell on stderr; a second start loads nothing. The weights of a
    model are announced once, and not for each cell."""
    said: list[Any] = []
    monkeypatch.setattr("mlxrun.model.load.model_info.log_weights", lambda *found: said.append(found))
    suite = write_suite(tmp_path, SUITE)
    assert main(["eval", str(suite)]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["task", "variant", "tiny", "other"],
        ["cities", "seed-0", *["100.0", "%", "[43.9,", "100.0]"] * 2],
        ["areas", "seed-0", *["1", "lines"] * 2],
        f"4 cells: 4 done: {tmp_path}/suite.out".split(),
    ]
    assert err.splitlines() == [
        "tiny/cities/seed-0: 3 of 3 lines done, 100.0 % [43.9, 100.0]",
        "tiny/areas/seed-0: 1 of 1 line done",
        "other/cities/seed-0: 3 of 3 lines done, 100.0 % [43.9, 100.0]",
        "other/areas/seed-0: 1 of 1 line done",
    ]
    assert [config.model.path for config in fake_engine] == ["embedded", "org/other"]
    cache = tmp_path / "suite.out/cache"
    assert {Path(str(config.cache.disk_path)).parent for config in fake_engine} == {cache}
    assert not any(cache.iterdir())
    assert main(["eval", str(suite)]) == 0
    assert capsys.readouterr().out == out and len(fake_engine) == len(said) == 2
    assert len(json.loads((tmp_path / "suite.out/suite.json").read_text())["runs"]) == 2


def test_standard_tasks(
    tmp_path: Path,
    fake_engine: list[Config],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are a suite that the command writes beside its cells; what it needs may be given as files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "It is 2.\\n#### 2"}\n')
    command = ["eval", "--tasks", "gsm8k", "--model", "org/Some-Model", "--data", "rows.jsonl"]
    assert main([*command, "--dry-run"]) == 0 and not list(tmp_path.glob("*.out"))
    assert main(command) == 0
    folder = tmp_path / "Some-Model-gsm8k.out"
    assert (folder / "Some-Model/gsm8k/seed-0/job.out.jsonl").is_file()
    capsys.readouterr()
    assert main(["eval", str(folder / "suite.yaml"), "-o", str(folder)]) == 0, "it runs as any suite"
    assert [config.model.path for config in fake_engine] == ["org/Some-Model"]
    assert len(read_cells(folder / "suite.yaml")[1]) == 1
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}")
    assert main([*command[:4], "./own", *command[5:]]) == 0, "a folder of the working directory"
    assert fake_engine[-1].model.path == str(tmp_path / "own")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a suite, or --tasks"),
        (["s.yaml", "--tasks", "arc"], "give a suite, or --tasks"),
        (["s.yaml", "--model", "m"], "a suite has keys for them"),
        (["--tasks", "arc,gsm9k"], "--tasks: there is no task 'gsm9k' (did you mean 'gsm8k'?)"),
        (["--tasks", "arc,mmlu", "--data", "a.csv"], "--data a.csv: write TASK=FILE, with one of arc, mmlu"),
        (["--tasks", "arc", "--data", "a.csv", "--data", "arc=b.csv"], "arc has a file already"),
        (["--tasks", "arc", "--data", "acr=a.csv"], "--data acr=a.csv: write TASK=FILE, with one of arc"),
        (["--tasks", "arc", "--data", "none.csv"], "none.csv: there is no such file"),
    ],
)
def test_standard_tasks_that_are_wrong(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_options(tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    suite = write_suite(tmp_path, SUITE)
    (tmp_path / "base.yaml").write_text("scheduler: {max_running: 3}\n")
    arguments = ["-c", str(tmp_path / "base.yaml"), "--set", "cache.backend=none", "-o", str(tmp_path / "o")]
    assert main(["eval", str(suite), *arguments, "--only", "*/cities", "--only", "tiny", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "(first 2)" in out
    assert out.splitlines()[-2:] == [
        f"4 cells: 2 with the first 2 lines, 1 done, 1 todo: {tmp_path}/o",
        "a start without --limit continues the cells that have their first lines only",
    ]
    assert {config.scheduler.max_running for config in fake_engine} == {3}
    assert {config.cache.backend for config in fake_engine} == {"none"}
    assert not (tmp_path / "o/other/areas").exists()
    assert main(["eval", str(suite), "--only", "tiny/c*", "--only", "none/*"]) == 2
    err = capsys.readouterr().err
    assert err == (
        "mlxrun: --only none/*: no cell has this name; the suite has tiny/cities, tiny/areas, other/cities, "
        "other/areas\n"
    )


def test_a_model_that_cannot_be_loaded(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, SUITE.replace("org/other", "org/broken"))
    assert main(["eval", str(suite)]) == 3
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[-1] == "failed" and "4 cells: 2 done, 2 failed" in out
    assert "other/cities/seed-0: failed: the weights are damaged" in err.splitlines()
    assert out.splitlines()[-1] == "2 cells failed: the weights are damaged"
    assert "continues from here" not in err and "0 of 3 lines" not in err
    assert len(fake_engine) == 2


def test_lines_that_all_failed_have_their_reason_in_the_summary(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, SUITE.replace("{{ area }}", "LONG {{ area }}"))
    assert main(["eval", str(suite), "--only", "tiny/areas"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2] == "1 line failed:" and out[-1].startswith("  1 x the engine got ")
    page = render_markdown(read_runs([tmp_path / "suite.out"]))
    assert "The most frequent reason (1 line): the engine got " in page


def test_mistakes_are_found_before_anything_is_loaded(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    text = SUITE.replace("expected: capital", "expected: captial").replace("org/other}", "org/other, a.b: 1}")
    suite = write_suite(tmp_path, text.replace("limit: 1", "limit: no"))
    assert main(["eval", str(suite)]) == 2
    out, err = capsys.readouterr()
    assert [line.removeprefix(f"mlxrun: {suite}:") for line in err.splitlines()] == [
        "5:65: tasks.cities.expected: "
        f"{tmp_path}/cities.csv has no column 'captial' (did you mean 'capital'?)",
        "6:58: tasks.areas.limit: 'no' is not an integer or null",
        "3:40: a: unknown key",
    ]
    assert out == "" and not fake_engine and not (tmp_path / "suite.out").exists()


def test_dry_run(tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    suite = write_suite(tmp_path, SUITE)
    assert main(["eval", str(suite), "--dry-run", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["tiny/cities/seed-0"][0] == "2" and rows["other/areas/seed-0"][0] == "1"
    assert "4 cells, 6 lines, " in out and "memory: org/other has 0 B of weights" in out
    assert not fake_engine and not (tmp_path / "suite.out").exists()


def test_the_example_is_a_good_suite() -> None:
    """The suite of the docs: its data fit it, whatever model runs it."""
    _, cells, jobs = read_cells(REPOSITORY / "jobs/suite.yaml")
    assert len(cells) == 3 * (2 + 2 + 1) and len({cell.engine_key for cell in cells}) == 2
    assert jobs.file.problems == []


def test_help_shows_a_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert "vary: {sampling.temperature: [0, 0.7]}" in out and "Exit codes:" in out
