"""`make plots`: the images in docs/ are what `benchmarks.plots` draws from benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.plots.results import hash_result

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.name)
def test_images_are_small_svg_without_scripts_or_links(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert len(text) < 300_000
    assert "<script" not in text
    assert not re.search(r'(href|src)="(?!#)', text)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_say_where_they_come_from(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    origin = {"date", "command", "machine", "versions"}
    assert origin <= report.keys() and report.keys() - origin
    assert "/home/" not in json.dumps(report) and "/tmp/" not in json.dumps(report)


def test_pictures_of_results_are_up_to_date() -> None:
    shown = {
        path.name: re.search(r"<dc:source>(.*)</dc:source>", path.read_text())
        for path in IMAGES.glob("*.svg")
    }
    sources = {found[1] for found in shown.values() if found}
    names = {source.split(".json")[0] for source in sources}
    assert names == {"engine-h200", "engine-cpu", "server-cpu"}
    assert sources == {hash_result(name) for name in names}, "make plots"


def test_drawing_is_deterministic_and_the_images_are_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pyte")
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.plots.__main__ import main

    main([str(tmp_path / "one")])
    main([str(tmp_path / "two")])
    shown = {path.name: path.read_bytes() for path in (tmp_path / "one").glob("*.svg")}
    assert shown == {path.name: path.read_bytes() for path in (tmp_path / "two").glob("*.svg")}
    assert shown.keys() == {path.name for path in IMAGES.glob("*.svg")}
    for name in ("request-life-light.svg", "request-life-dark.svg", "resume.svg"):  # no matplotlib in these
        assert shown[name] == (IMAGES / name).read_bytes(), f"{name} is stale: make plots"
