"""`python -m benchmarks embeddings`: a small run; how fast it is is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import embeddings
from benchmarks.__main__ import command


def test_all_sides_give_the_same_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VOCABULARY": 100, "SIZE": 32, "INNER": 64, "LAYERS": 2, "HEADS": 4}.items():
        monkeypatch.setattr(embeddings, name, value)
    out = tmp_path / "report.json"
    done = CliRunner().invoke(
        command, ["embeddings", "--texts", "12", "--repeat", "2", "--json", str(out)], standalone_mode=False
    )
    assert done.exception is None, done.output
    report = json.loads(out.read_text())
    assert report["texts"] == 12 and [len(side["runs"]) for side in report["sides"].values()] == [2] * 5
    assert all(name in done.output for name in report["sides"])
    assert report["sides"][embeddings.TOGETHER]["ratio"] == {"seconds": 1, "processor_seconds": 1}
    compared = report["largest_difference"]
    assert compared.keys() == report["sides"].keys() - {embeddings.TOGETHER, embeddings.PRODUCTS}
    assert max(compared.values()) < 1e-5
