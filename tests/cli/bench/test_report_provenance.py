"""Every JSON report of `mlxrun bench` says when, where and with which versions it was measured."""

from __future__ import annotations

import sys
from datetime import datetime

import pytest

from mlxrun.cli.bench.report import add_provenance, read_machine_facts


def test_a_report_gets_its_date_command_machine_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/mlxrun", "bench", "serve", "--url", "a b"])
    report = add_provenance({"format": 1, "workloads": {}})
    assert report["command"] == "mlxrun bench serve --url 'a b'"
    assert datetime.fromisoformat(report["date"]).utcoffset() is not None
    assert report["machine"] == read_machine_facts()
    assert {"mlxrun", "python", "mlx", "mlx-lm"} <= report["versions"].keys()
    assert report["format"] == 1


def test_what_the_report_says_itself_is_kept() -> None:
    report = add_provenance({"date": "then", "versions": {"mlx": "of the peer"}})
    assert report["date"] == "then"
    assert report["versions"]["mlx"] == "of the peer"
    assert "python" in report["versions"]


def test_the_machine_has_a_processor_cores_and_a_system() -> None:
    facts = read_machine_facts()
    assert facts["cpu"] and facts["os"] and facts["arch"]
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] is None or facts["memory_bytes"] > 0
