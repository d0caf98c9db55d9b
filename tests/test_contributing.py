"""CONTRIBUTING.md: the files of its recipes exist, and the recipe of media is true of every kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from mlxrun.api.text.media.media_kinds import MEDIA
from mlxrun.cluster.ray import ray_workers
from mlxrun.jobs.lines.line_keys import find_local_images
from tools.docs_site.prose import ROOT

SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
RECIPES = {section.splitlines()[0]: section for section in SECTIONS if section.startswith("Add ")}
PATH = re.compile(r"`((?:mlxrun|tests|tools|benchmarks|docs|configs)/[\w./-]+)`|pytest ([^`\n]+)")
PARTS = [medium.part for medium in MEDIA]


def list_missing(text: str) -> list[str]:
    """The paths of a text that do not exist. NAME stands for what a reader chooses."""
    found = [path for one, many in PATH.findall(text) for path in (one, *many.split()) if "/" in path]
    return [path for path in found if "NAME" not in path and not (ROOT / path).exists()]


def test_there_are_recipes() -> None:
    wanted = ("config key", "endpoint", "tool-call family", "cache tier", "kind of media", "model hook")
    assert all(any(name in title for title in RECIPES) for name in wanted)


@pytest.mark.parametrize("title", RECIPES)
def test_the_files_of_a_recipe_exist(title: str) -> None:
    assert list_missing(RECIPES[title]) == []


def test_a_file_that_is_gone_is_seen() -> None:
    text = "`mlxrun/core/errors.py`, `mlxrun/core/no.py`\n.venv/bin/pytest tests/core tests/no_core\n"
    assert list_missing(text) == ["mlxrun/core/no.py", "tests/no_core"]


def make_part(part: str) -> Mapping[str, Any]:
    """A part of a message that names a file of the job's folder."""
    named = {"file_data": "media/a.bin"} if part == "file" else {"url": "media/a.bin"}
    return {"type": part, part: named}


@pytest.mark.parametrize("part", PARTS)
def test_files_of_every_kind_of_media_are_found_in_lines(part: str) -> None:
    """For the digests of a job's lines, and for workers that do not see the job's folder."""
    assert list(find_local_images({"messages": [{"role": "user", "content": [make_part(part)]}]})) == [
        "media/a.bin"
    ]
    read = ray_workers._replace([make_part(part)], lambda url, kind: f"data:{kind[1]}")
    assert "media/a.bin" not in str(read) and "data:" in str(read)


@pytest.mark.parametrize("part", PARTS)
def test_every_kind_of_media_is_documented(part: str) -> None:
    for page in ("server", "jobs"):
        assert f'"type": "{part}"' in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), page


def test_a_kind_that_is_not_known_is_seen() -> None:
    assert list(find_local_images({"messages": [make_part("smell_url")]})) == []
