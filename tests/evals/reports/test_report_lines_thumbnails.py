"""Thumbnails of the images of prompts."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from mlxrun.evals.reports import report_lines
from mlxrun.evals.reports.report_lines import Thumbnails


def save_image(path: Path, size: tuple[int, int] = (900, 450)) -> None:
    Image.new("RGB", size, (200, 30, 30)).save(path)


def open_url(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_files_and_data_urls_are_made_small(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    made = Thumbnails(tmp_path, {"roots": ["."]})
    url, name = made.make("a.png")
    assert name == "a.png" and open_url(url).size == (320, 160)
    inline = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    assert made.make(inline) == (url, "inline image")
    full, _ = Thumbnails(tmp_path, {}, full=True).make("a.png")
    assert open_url(full).size == (900, 450)


@pytest.mark.parametrize(
    "source, reason",
    [
        ("none.png", "does not exist"),
        ("../outside.png", "outside media.roots"),
        ("http://127.0.0.1:9/a.png", "not fetched"),
        ("text.png", "not a readable image"),
        ("", "empty"),
    ],
)
def test_what_cannot_be_shown_says_why(tmp_path: Path, source: str, reason: str) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    save_image(tmp_path / "outside.png")
    (folder / "text.png").write_text("no image")
    url, name = Thumbnails(folder, {"roots": ["."]}).make(source)
    assert url == "" and reason in name


def test_all_thumbnails_together_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_lines, "MAX_BYTES", 100)
    for name in ("a.png", "b.png"):
        save_image(tmp_path / name)
    made = Thumbnails(tmp_path, {})
    assert made.make("a.png")[0] and "have more than" in made.make("b.png")[1]
    assert made.make("a.png")[0], "an image that was made once stays"


def test_sounds_are_as_they_were(tmp_path: Path) -> None:
    sound = b"RIFF\0\0\0\0WAVE"
    (tmp_path / "a.bin").write_bytes(sound)
    made = Thumbnails(tmp_path, {"roots": ["."]})
    inline = "data:audio/mp3;base64," + base64.b64encode(sound).decode()
    expected = inline.replace("mp3", "wav")
    assert made.make(inline, is_sound=True) == (expected, "inline sound")
    assert made.make("a.bin", is_sound=True) == (expected, "a.bin")
    for source, reason in (
        ("data:audio/wav;base64,AAAA", "no WAV"),
        ("data:audio/wav;base64,%", "not valid base64"),
        ("none.wav", "does not exist"),
        ("http://127.0.0.1:9/a.wav", "not fetched"),
    ):
        url, why = made.make(source, is_sound=True)
        assert url == "" and reason in why
