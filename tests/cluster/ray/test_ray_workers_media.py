"""Files that lines name by path go along with them to workers that do not see the job's folder."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.text.media.media_sources import MediaSources
from mlxrun.cluster.ray.ray_workers import inline_media
from mlxrun.config.settings import MediaSettings
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.line_keys import find_local_images

PATHS = ("a.png", "b.mp4", "c.pdf")
PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
    {"type": "video_url", "video_url": {"url": "b.mp4"}},
    {"type": "file", "file": {"file_data": "c.pdf", "filename": "c.pdf"}},
    {"type": "input_image", "image_url": "a.png"},
    {"type": "input_file", "file_data": "c.pdf"},
    {"type": "input_file", "file_url": "c.pdf"},
    {"type": "text", "text": "a.png"},
]


@pytest.fixture
def sources(tmp_path: Path) -> MediaSources:
    """Of a folder whose files have their names as their content."""
    folder = tmp_path / "job"
    folder.mkdir()
    for name in PATHS:
        (folder / name).write_text(name)
    (tmp_path / "outside.png").write_text("secret")
    return MediaSources(MediaSettings(max_bytes=50), folder)


def read_data(url: str) -> str:
    return base64.b64decode(url.partition(";base64,")[2]).decode()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": PARTS}]},
        {"input": [{"type": "message", "role": "user", "content": PARTS}]},
        {"input": [{"type": "function_call_output", "output": PARTS}]},
    ],
)
def test_paths_become_data(body: dict[str, Any], sources: MediaSources) -> None:
    """In every place that can have one; all else stays, and the line that is given does not change."""
    before = copy.deepcopy(body)
    sent = inline_media(JobLine(1, "a", "/v1/chat/completions", body), sources)
    assert body == before and not list(find_local_images(sent.body))
    turn = (sent.body.get("messages") or sent.body["input"])[0]
    parts = turn.get("content") or turn["output"]
    assert parts[0]["image_url"]["detail"] == "low" and parts[-1] == PARTS[-1]
    assert read_data(parts[0]["image_url"]["url"]) == "a.png" == read_data(parts[3]["image_url"])
    assert read_data(parts[1]["video_url"]["url"]) == "b.mp4"
    assert parts[1]["video_url"]["url"].startswith("data:video/")
    files = (parts[2]["file"]["file_data"], parts[4]["file_data"], parts[5]["file_url"])
    assert all(each.startswith("data:application/pdf;") and read_data(each) == "c.pdf" for each in files)


def test_what_may_not_be_read_stays_a_path(sources: MediaSources, tmp_path: Path) -> None:
    (tmp_path / "job" / "large.png").write_bytes(bytes(100))
    urls = ("none.png", "../outside.png", str(tmp_path / "outside.png"), "large.png", "https://x/y.png")
    content = [{"type": "image_url", "image_url": {"url": url}} for url in (*urls, "a.png")]
    line = JobLine(1, "a", "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    found = [part["image_url"]["url"] for part in inline_media(line, sources).body["messages"][0]["content"]]
    assert tuple(found[:-1]) == urls and read_data(found[-1]) == "a.png"


def test_lines_without_paths_are_not_copied(sources: MediaSources) -> None:
    line = JobLine(1, "a", "/v1/completions", {"prompt": "a.png"})
    assert inline_media(line, sources) is line
