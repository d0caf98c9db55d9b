"""What benchmark commands share: options, and the report as a table, a file or JSON on standard output."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlxrun.cli.bench.report import read_machine_facts, write_report
from mlxrun.cli.options import add_measure_options
from mlxrun.core.errors import JobError


def test_a_report_is_written_with_its_machine(tmp_path: Path) -> None:
    assert write_report({"format": 1}, tmp_path / "report.json", lambda report: None) == 0
    assert json.loads((tmp_path / "report.json").read_text())["machine"] == read_machine_facts()


def test_a_report_on_standard_output_comes_without_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[object] = []
    assert write_report({"format": 1}, Path("-"), shown.append) == 0
    assert json.loads(capsys.readouterr().out)["format"] == 1 and shown == []
    assert write_report({"format": 1}, None, shown.append) == 0
    assert shown == [{"format": 1}] and capsys.readouterr().out == ""


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--json .*x.json: cannot be written: No such file"):
        write_report({}, tmp_path / "no" / "x.json", lambda report: None)


def test_the_options_of_all_benchmarks() -> None:
    found: dict[str, object] = {}

    @click.command()
    @add_measure_options
    def bench(**options: object) -> None:
        found.update(options)

    assert CliRunner().invoke(bench, ["--scale", "0.5", "--json", "-"]).exit_code == 0
    assert found == {
        "model": "tiny",
        "scale": 0.5,
        "repeat": 3,
        "json_path": Path("-"),
        "config_path": None,
        "sets": (),
    }
    assert CliRunner().invoke(bench, ["--scale", "0"]).exit_code == 2
    assert CliRunner().invoke(bench, ["--repeat", "0"]).exit_code == 2
