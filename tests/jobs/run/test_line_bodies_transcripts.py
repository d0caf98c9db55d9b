"""Jobs whose lines ask for transcripts of files, with a tiny Whisper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrun.api.text.media.images import get_image_memory
from mlxrun.cli.main import main
from mlxrun.config.media_settings import DEFAULT_IMAGE_BYTES
from mlxrun.config.settings import Config, MediaSettings, ModelSettings
from mlxrun.jobs.lines.job_check import check_job
from mlxrun.jobs.lines.job_file import TRANSCRIPTION, JobLine
from mlxrun.jobs.lines.line_keys import LineKeys, find_local_images
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.audio_files import audio_url, make_wav
from tests.helpers.whisper_models import RATE, make_speech, write_whisper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("model") / "tiny-whisper")


def make_sound(seconds: float, seed: int = 0) -> bytes:
    return make_wav(np.round(make_speech(seconds, seed) * 20_000).astype(np.int16)[:, None], RATE)


def write_job(folder: Path, lines: list[dict[str, Any]]) -> Path:
    (folder / "sounds").mkdir()
    (folder / "sounds" / "a.wav").write_bytes(make_sound(31))
    (folder / "sounds" / "b.wav").write_bytes(make_sound(4, 1))
    (folder / "sounds" / "torn.wav").write_bytes(make_sound(4, 1)[:5000])
    job = folder / "job.jsonl"
    job.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return job


LINES: list[dict[str, Any]] = [
    {"custom_id": "a", "method": "POST", "url": TRANSCRIPTION, "body": {"file": "sounds/a.wav"}},
    {"id": "b", "file": "sounds/b.wav", "response_format": "verbose_json"},
    {"id": "b2", "file": audio_url(make_sound(4, 1)), "eval": {"expected": "tade", "match": "contains"}},
    {"id": "torn", "file": "sounds/torn.wav"},
    {"id": "gone", "file": "sounds/gone.wav"},
    {"id": "srt", "file": "sounds/b.wav", "response_format": "srt"},
    {"id": "chat", "prompt": "hi"},
]


def test_a_job_of_transcripts(folder: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, LINES)
    options = ["--set", f"model.path={folder}"]
    assert main(["batch", str(job), *options]) == 1
    output = tmp_path / "job.out.jsonl"
    first = output.read_bytes()
    made = {record["custom_id"]: record["response"]["body"] for record in map(json.loads, first.splitlines())}
    assert made.keys() == {"a", "b", "b2"}
    assert made["a"]["usage"] == {"type": "duration", "seconds": 31}
    assert made["b"]["text"] == made["b2"]["text"] != made["a"]["text"] != ""
    assert made["b"]["segments"]
    errors = (tmp_path / "job.errors.jsonl").read_text()
    for text in ("the file is torn", "does not exist", "srt is no JSON", "generates no text"):
        assert text in errors
    scores = json.loads((tmp_path / "job.out.jsonl.run" / "scores.json").read_text())
    assert scores["total"]["lines"] == 1
    assert main(["batch", str(job), *options, "--fresh"]) == 1
    assert sorted(output.read_bytes().splitlines()) == sorted(first.splitlines())


async def test_a_dry_run_reads_the_files_and_keeps_no_memory(folder: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, LINES)
    config = Config(model=ModelSettings(path=str(folder)))
    preparer = LinePreparer(load_model_info(config.model), config, tmp_path)
    reports: list[tuple[int, str]] = []
    found = await check_job(job, preparer, None, lambda number, text: reports.append((number, text)))
    assert (found.lines, found.refused, found.requests) == (7, 4, 3)
    assert [number for number, _ in sorted(reports)] == [4, 5, 6, 7]
    assert get_image_memory(DEFAULT_IMAGE_BYTES).used == 0


def test_the_content_of_a_file_is_part_of_the_key(tmp_path: Path) -> None:
    line = JobLine(0, "a", TRANSCRIPTION, {"file": "a.wav"})
    assert list(find_local_images(line.body)) == ["a.wav"]
    assert list(find_local_images({"file": "data:audio/wav;base64,AAAA"})) == []
    found = set()
    for content in (b"1", b"2"):
        (tmp_path / "a.wav").write_bytes(content)
        found.add(LineKeys("s", tmp_path, 1, max_audio=MediaSettings().audio_max_bytes).compute_key(line))
    assert len(found) == 2
