"""Rows of tables and of data sets of the hub."""

from __future__ import annotations

import base64
import importlib
import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from PIL import Image

from mlxrun.core.errors import JobError
from mlxrun.evals.suites import task_rows
from mlxrun.evals.suites.suite_settings import HubSource
from mlxrun.evals.suites.task_rows import RowSource, make_data_url, open_rows
from mlxrun.jobs.lines.table_files import RowError


def test_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n{"a": 3}\n')
    source = open_rows("a.jsonl", None, tmp_path)
    assert list(source.read(2)) == list(source.read(2)) == [(1, {"a": 1}), (3, {"a": 2})]
    assert (source.name, source.folder) == (str(tmp_path / "a.jsonl"), tmp_path)
    with pytest.raises(JobError, match="b.csv: there is no such file"):
        open_rows("b.csv", None, tmp_path)
    with pytest.raises(JobError, match=": it is a folder, not a file"):
        open_rows(".", None, tmp_path)


def test_a_data_set_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(JobError, match=r"org/x is on the hub, .* pip install 'mlxrun\[hub\]', or"):
        open_rows(None, HubSource("org/x"), tmp_path)


def test_a_data_set_whose_library_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def load_dataset(self, *args: object, **given: object) -> None:
            raise ValueError("Unknown split 'tset'\nmore")

    own = logging.getLogger("datasets")
    monkeypatch.setattr(own, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(importlib, "import_module", lambda name: Broken())
    monkeypatch.setattr(task_rows, "is_hub_reachable", lambda: True)
    with pytest.raises(JobError, match="the data set org/x cannot be loaded: Unknown split 'tset'$"):
        open_rows(None, HubSource("org/x"), tmp_path)
    assert own.handlers == [], "its messages would be there twice"


def test_without_the_hub_only_the_cache_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries are told before they are asked, as they would repeat requests for half a minute."""
    cached = {"org/x": [{"a": 1}]}

    class Library:
        config = SimpleNamespace(HF_HUB_OFFLINE=False)

        def load_dataset(self, name: str, *args: object, **given: object) -> list[dict[str, int]]:
            assert self.config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE
            return cached[name]

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(importlib, "import_module", lambda name: Library())
    monkeypatch.setattr(task_rows, "is_hub_reachable", lambda: False)
    assert list(open_rows(None, HubSource("org/x"), tmp_path).read()) == [(1, {"a": 1})]
    with pytest.raises(JobError, match=r"org/y cannot be loaded: the hub does not answer, .* \(--data\)"):
        open_rows(None, HubSource("org/y"), tmp_path)


def test_rows_that_a_function_prepares(tmp_path: Path) -> None:
    """What it raises, or another kind of value, is a problem of that row."""
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n[]\n{"b": 2}\n{"a": 0}\n')
    source = open_rows("a.jsonl", None, tmp_path, lambda row: row["a"] and {**row, "b": row["a"] + 1})
    first, bad, raised, other = (row for _, row in source.read())
    assert first == {"a": 1, "b": 2}
    assert [str(each) for each in (bad, raised, other)] == [
        "not a JSON object",
        "`prepare` raised KeyError: 'a'",
        "`prepare` returned no dict",
    ]


def test_a_local_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is found relative to the suite, and the library reads it as if it came from the hub."""
    received: list[object] = []

    class Library:
        def load_dataset(self, name: str, subset: str, **given: object) -> list[dict[str, object]]:
            received.extend([name, subset, given])
            return [{"a": 1, "picture": [Image.new("RGB", (2, 2))]}]

    (tmp_path / "set").mkdir()
    monkeypatch.setattr(importlib, "import_module", lambda name: Library())
    source = open_rows(None, HubSource("set", "train", "easy", "abc"), tmp_path)
    assert received == [str(tmp_path / "set"), "easy", {"split": "train", "revision": "abc"}]
    ((number, row),) = source.read()
    assert not isinstance(row, RowError) and (number, row["a"], source.name) == (1, 1, "set[train]")
    (url,) = row["picture"]
    image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    assert image.size == (2, 2)


@pytest.mark.slow
def test_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/test.csv").write_text("a,b\n1,x\n2,y\n")
    source = open_rows(None, HubSource("set"), tmp_path)
    assert list(source.read()) == list(source.read()) == [(1, {"a": 1, "b": "x"}), (2, {"a": 2, "b": "y"})]
    with pytest.raises(JobError, match="the data set set cannot be loaded: Unknown split"):
        open_rows(None, HubSource("set", "none"), tmp_path)


def test_bytes_that_are_no_image() -> None:
    assert make_data_url(b"\xff\xd8\xff\xe0").startswith("data:image/jpeg;base64,")
    with pytest.raises(RowError, match="neither PNG"):
        make_data_url(b"text")
    assert RowSource("x", None, dataset=[]).folder is None
