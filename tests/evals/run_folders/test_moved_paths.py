"""What a config names by path is found after the run has moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.config.settings import Config, MediaSettings, ModelSettings
from mlxrun.evals.run_folders.moved_paths import find_moved, find_moved_paths

OLD = Path("/nowhere/old/jobs")


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_a_path_is_found_where_it_moved_to(tmp_path: Path) -> None:
    """At its place relative to the job first, then where it was, then beside the job by its name."""
    job = make_folder(tmp_path / "new/jobs")
    model = make_folder(tmp_path / "new/models/a")
    assert find_moved("/nowhere/old/models/a", OLD, job) == str(model)
    adapter = make_folder(job / "adapter")
    assert find_moved("/nowhere/else/adapter", OLD, job) == str(adapter)
    still = make_folder(tmp_path / "still")
    assert find_moved(str(still), OLD, job) == str(still)
    assert find_moved("/nowhere/lost", OLD, job) == "/nowhere/lost"


@pytest.mark.parametrize("name", ["embedded", "org/model", "."])
def test_names_and_relative_paths_stay(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "org/model")
    assert find_moved(name, OLD, tmp_path) == name


def test_every_path_that_decides_answers_is_looked_for(tmp_path: Path) -> None:
    job = make_folder(tmp_path / "jobs")
    names = ("model", "draft", "one", "two", "images")
    moved = {name: str(make_folder(tmp_path / name)) for name in names}
    (tmp_path / "t.jinja").write_text("x")
    old = {name: f"/nowhere/old/{name}" for name in (*names, "t.jinja")}
    model = ModelSettings(
        path=old["model"],
        draft=old["draft"],
        adapter=old["one"],
        adapters={"b": old["two"]},
        chat_template=old["t.jinja"],
    )
    config = Config(model=model, media=MediaSettings(roots=(".", old["images"])))
    found = find_moved_paths(config, {"input": {"path": str(OLD / "job.jsonl")}}, job)
    assert (found.model.path, found.model.draft, found.model.adapter) == (
        moved["model"],
        moved["draft"],
        moved["one"],
    )
    assert found.model.adapters == {"b": moved["two"]}
    assert found.model.chat_template == str(tmp_path / "t.jinja")
    assert found.media.roots == (".", moved["images"])
