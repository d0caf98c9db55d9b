"""`mlxrun export`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxrun.cli.commands.runs.export import FORMATS
from mlxrun.cli.main import main
from mlxrun.evals.exports import export_files
from tests.helpers.batch_fakes import Bench, chats, write_job
from tests.helpers.export_fakes import finish_rich_job

pytestmark = pytest.mark.thorough


def test_formats_are_those_of_the_exporter() -> None:
    assert FORMATS == export_files.FORMATS


def test_the_paths_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = asyncio.run(finish_rich_job(tmp_path))
    card = tmp_path / "cards/README.md"
    arguments = [
        "--format",
        "model-card",
        "-o",
        str(card),
        "--model-id",
        "acme/tiny",
        "--dataset",
        "acme/sums",
    ]
    assert main(["export", str(run.run.paths.job), *arguments]) == 0
    assert capsys.readouterr().out == f"{card}\n"
    assert "type: acme/sums" in card.read_text() and "name: acme/tiny" in card.read_text()


def test_what_cannot_be_exported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(write_job(tmp_path, chats(9)))
    asyncio.run(bench.run(limit=4))
    capsys.readouterr()
    assert main(["export", str(bench.job), "--format", "inspect"]) == 2
    reason = "the run is unfinished, with 4 of 9 lines done; finish it, or give --partial"
    assert capsys.readouterr().err == f"mlxrun: {bench.paths.out}: {reason}\n"
    assert main(["export", str(bench.job), "--format", "inspect", "--partial"]) == 0
    assert main(["export", str(tmp_path / "none"), "--format", "inspect"]) == 2
    assert main(["export", str(bench.job), "--format", "csv"]) == 2


def test_help_has_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {form}  " in shown for form in FORMATS) and "--partial" in shown
