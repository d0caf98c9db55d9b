"""`mlxrun report`: where reports go, in which format, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import chats, edit_line
from tests.helpers.report_jobs import run_lines, write_suite

pytestmark = pytest.mark.thorough


async def test_a_report_lies_in_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = await run_lines(tmp_path, chats(3))
    assert main(["report", str(bench.job)]) == 0
    path = bench.paths.folder / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_text().startswith("<!doctype html>")
    assert main(["report", str(bench.paths.out), "--format", "md"]) == 0
    assert (bench.paths.folder / "report.md").read_text().startswith("## job on embedded")
    assert (await bench.run()).exit_code == 0, "a report does not harm the run"


async def test_a_suites_report_lies_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "s.out"
    await run_lines(suite / "m" / "t" / "seed-1", chats(2))
    write_suite(suite)
    assert main(["report", str(suite)]) == 0
    assert capsys.readouterr().out == f"{suite / 'report.html'}\n"


async def test_a_cells_report_lies_in_its_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "s.out"
    bench = await run_lines(suite / "m" / "t" / "seed-1", chats(2))
    write_suite(suite)
    for path in (bench.job, suite / "m"):
        assert main(["report", str(path)]) == 0
        assert capsys.readouterr().out == f"{bench.paths.folder / 'report.html'}\n"


async def test_other_places_and_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = await run_lines(tmp_path, chats(3))
    assert main(["report", str(bench.job), "-o", "-", "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("## job on embedded")
    assert main(["report", str(bench.job), "-o", str(tmp_path / "x.md")]) == 0
    assert (tmp_path / "x.md").read_text().startswith("## job")
    assert main(["report", str(bench.job), str(bench.job), "-o", str(tmp_path / "two.html"), "--full"]) == 0
    assert 'id="difference"' in (tmp_path / "two.html").read_text()


async def test_problems_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = await run_lines(tmp_path, chats(3))
    edit_line(bench.paths.out, 1, lambda line: line.replace(b"say", b"sat"))
    assert main(["report", str(bench.job)]) == 0
    assert "job.out.jsonl:2: line " in capsys.readouterr().err


async def test_what_cannot_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err
    bench = await run_lines(tmp_path, chats(1))
    assert main(["report", str(bench.job), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
