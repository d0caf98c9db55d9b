"""`mlxrun history`: notes runs, draws their trend, and fails on conditions."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.commands.runs.export import FORMATS
from mlxrun.cli.main import main
from tests.helpers.batch_fakes import chats
from tests.helpers.eval_runs import run_lines
from tests.helpers.suite_files import CAPITALS, write_suite

pytestmark = pytest.mark.thorough


async def test_a_nightly_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, job = tmp_path / "nightly.jsonl", str(await run_lines(tmp_path / "a", chats(6)))
    assert main(["history", str(path), job]) == 0
    out = capsys.readouterr().out
    assert (
        "job.out.jsonl" in out and "100.0 % [61.0, 100.0]" in out and "too few runs to tell (1 of 5)" in out
    )
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    earlier = [json.dumps({**row, "time": f"night {at}"}) + "\n" for at in range(4)]
    worse = json.dumps({**row, "value": 0.5, "time": "today"}) + "\n"
    path.write_text("".join([*earlier, worse]))
    assert main(["history", str(path), "--fail-if", "jump", "--fail-if", "drift"]) == 1
    shown = capsys.readouterr()
    assert "████▁" in shown.out and "-50.0 points" in shown.out
    assert shown.err == (
        "mlxrun: --fail-if job.out.jsonl: jump: 50.0 % is worse than was to be expected, [100.0, 100.0]\n"
    )
    assert main(["history", str(path), "--html", str(tmp_path / "trend.html")]) == 0
    assert '<path class="line"' in (tmp_path / "trend.html").read_text()
    capsys.readouterr()
    assert main(["history", str(path), "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    assert cell["values"] == [1.0] * 4 + [0.5] and cell["jump"] and not cell["drift"]


async def test_failed_lines_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nightly.jsonl"
    lines = [line | {"body": line["body"] | {"max_tokens": 10**9}} for line in chats(6)]
    job = str(await run_lines(tmp_path / "a", lines))
    assert main(["history", str(path), job]) == 0
    out = capsys.readouterr().out
    assert "; 6 lines failed" in out and out.endswith(f"{path}: 1 row added, 0 already there\n")
    assert main(["history", str(path), job]) == 0
    assert capsys.readouterr().out.endswith(f"{path}: 0 rows added, 1 already there\n")
    assert main(["history", str(path), job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["added"], found["already_there"]) == (0, 1) and found["cells"][0]["failed"] == [6]


def test_no_history_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(tmp_path / "x.jsonl")]) == 2
    assert "is no history yet" in capsys.readouterr().err


def test_cells_that_are_changed_are_named(
    tmp_path: Path, fake_engine: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a history and in a bundle, which have them all the same."""
    other = "      countries: {data: other.csv, prompt: '{{ country }}', expected: country}\n"
    suite = write_suite(tmp_path, CAPITALS + other, other_csv="country\nPeru\n")
    assert main(["eval", str(suite)]) == 0
    path, bundle = tmp_path / "nightly.jsonl", tmp_path / "suite.tar.gz"
    says = "{}: changed: its lines, settings or scorers are earlier ones than those that the suite has now"
    for names in ([], ["tiny/capitals/seed-0"]):
        for command in (["history", str(path), str(suite)], ["bundle", str(suite), "-o", str(bundle)]):
            capsys.readouterr()
            assert main(command) == 0
            found = [line for line in capsys.readouterr().err.splitlines() if "changed" in line]
            assert found == [f"warning: {says.format(name)}" for name in names]
        cities = tmp_path / "cities.csv"
        cities.write_text(cities.read_text().replace("Lima", "Cusco"))
        assert main(["eval", str(suite), "--only", "*/countries"]) == 0
    capsys.readouterr()
    cell = tmp_path / "suite.out/tiny/capitals/seed-0"
    assert main(["history", str(path), str(cell)]) == 0
    assert f"warning: {says.format(cell)}" in capsys.readouterr().err


def test_cells_that_failed_are_named(
    tmp_path: Path, fake_engine: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """With answers of an earlier start or without any; the latter are no part of a single cell's history."""
    suite = write_suite(tmp_path, CAPITALS)
    assert main(["eval", str(suite)]) == 0
    manifest = tmp_path / "suite.out" / "suite.json"
    found = json.loads(manifest.read_text())
    found["cells"][0]["state"] = "failed"
    found["cells"].append(found["cells"][0] | {"name": "large/capitals/seed-0"})
    manifest.write_text(json.dumps(found))
    earlier = "warning: {}: failed: its answers, or their scores, are those of an earlier start"
    of_suite = [
        earlier.format("tiny/capitals/seed-0"),
        "warning: large/capitals/seed-0: failed: it is left out",
    ]
    cell = manifest.parent / "tiny/capitals/seed-0"
    path, bundle = str(tmp_path / "nightly.jsonl"), str(tmp_path / "suite.tar.gz")
    for run, says in ((suite, of_suite), (manifest.parent, of_suite), (cell, [earlier.format(cell)])):
        for command in (["history", path, str(run)], ["bundle", str(run), "-o", bundle]):
            capsys.readouterr()
            assert main(command) == 0
            assert [line for line in capsys.readouterr().err.splitlines() if "failed" in line] == says


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8")
async def test_a_run_whose_name_is_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is noted, compared and exported. JSON has an escape for the byte."""
    name, path = os.fsdecode(b"caf\xe9.jsonl"), tmp_path / "nightly.jsonl"
    job = str(await run_lines(tmp_path / "a", chats(6), name=name))
    for added in (1, 0):
        assert main(["history", str(path), job]) == 0
        assert capsys.readouterr().out.endswith(
            f": {added} row{'s' * (not added)} added, {1 - added} already there\n"
        )
    assert json.loads(path.read_bytes())["cell"] == os.fsdecode(b"caf\xe9.out.jsonl")
    assert main(["compare", job, job, "--json", str(tmp_path / "c.json")]) == 0
    json.loads((tmp_path / "c.json").read_bytes())
    for form in FORMATS:
        out = tmp_path / ("inspect.json" if form == "inspect" else f"{form}.md")
        assert main(["export", job, "--format", form, "-o", str(out)]) == 0
    for file in tmp_path.rglob("*.json"):
        assert json.loads(file.read_bytes())
