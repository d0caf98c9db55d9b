"""/v1/audio/transcriptions of a running server, with a tiny Whisper."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlxrun.config.settings import Config, MediaSettings, ModelSettings
from mlxrun.core.request import TokenEvent
from mlxrun.engine.workloads.transcription import TranscriptionSteps
from tests.helpers.audio_files import make_wav
from tests.helpers.command_processes import PATIENCE, wait_until
from tests.helpers.served_model import ModelServer, run_model_server
from tests.helpers.whisper_models import RATE, make_speech, write_whisper

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = write_whisper(tmp_path_factory.mktemp("models") / "tiny-whisper")
    media = MediaSettings(audio_max_bytes=3_000_000, audio_max_seconds=70)
    with run_model_server(Config(model=ModelSettings(path=str(folder)), media=media)) as found:
        yield found


def make_sound(seconds: float = 34, seed: int = 1) -> bytes:
    return make_wav(np.round(make_speech(seconds, seed) * 20_000).astype(np.int16)[:, None], RATE)


SOUND = make_sound()


def make_form(fields: list[tuple[str, str]], file: bytes | None = SOUND) -> tuple[bytes, str]:
    parts = [f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields]
    if file is not None:
        head = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        parts.append(head.encode() + file + b"\r\n")
    return b"".join(parts) + b"--x--\r\n", "multipart/form-data; boundary=x"


def call(server: ModelServer, *fields: tuple[str, str], file: bytes | None = SOUND) -> tuple[int, Any]:
    data, kind = make_form(list(fields), file)
    request = urllib.request.Request(server.url + PATH, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            raw = response.read().decode()
            return response.status, json.loads(raw) if raw.startswith("{") else raw
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


def test_the_forms_of_a_transcript_agree(server: ModelServer) -> None:
    _, plain = call(server)
    assert plain["text"]
    assert plain["usage"] == {"type": "duration", "seconds": 34}
    assert call(server, ("response_format", "text")) == (200, plain["text"] + "\n")
    _, verbose = call(server, ("response_format", "verbose_json"))
    assert (verbose["text"], verbose["duration"], verbose["language"]) == (plain["text"], 34.0, "english")
    segments = verbose["segments"]
    assert "".join(segment["text"] for segment in segments).strip() == plain["text"]
    assert [segment["id"] for segment in segments] == list(range(len(segments)))
    assert "words" not in verbose
    _, srt = call(server, ("response_format", "srt"))
    assert srt.count(" --> ") == len(segments)
    assert call(server, ("response_format", "vtt"))[1].startswith("WEBVTT\n\n00:00:")


def test_words_have_times(server: ModelServer) -> None:
    fields = (("response_format", "verbose_json"), ("timestamp_granularities[]", "word"))
    _, words = call(server, *fields)
    assert "segments" not in words
    assert [word["word"] for word in words["words"]]
    assert all(set(word) == {"word", "start", "end"} for word in words["words"])
    _, both = call(server, *fields, ("timestamp_granularities[]", "segment"))
    assert both["words"] == words["words"]
    assert both["segments"]


def test_a_stream_is_the_whole(server: ModelServer) -> None:
    _, plain = call(server)
    _, raw = call(server, ("stream", "true"))
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
    *deltas, last = events
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == plain["text"]
    assert last == {"type": "transcript.text.done", **plain}


def test_prompt_and_temperature_change_the_text(server: ModelServer) -> None:
    texts = {
        call(server, *fields)[1]["text"]
        for fields in ((), (("prompt", "tade goda"),), (("temperature", "0.9"), ("language", "English")))
    }
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ([("langauge", "en")], "langauge", "did you mean 'language'"),
        ([("language", "de")], "language", "knows only English"),
        ([("temperature", "hot")], "temperature", "expected a number"),
        ([("temperature", "1.5")], "temperature", "1.5 is greater than the maximum of 1"),
        ([("response_format", "xml")], "response_format", "is not one of"),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities", "needs response_format verbose"),
        ([("stream", "true"), ("response_format", "srt")], "stream", "its events have only text"),
        ([("stream", "yes")], "stream", "expected boolean"),
        ([("include[]", "logprobs")], "include", "transcripts have no logprobs"),
        ([("prompt", "a <|endoftext|> b")], "prompt", "special token"),
        ([("language", "en"), ("language", "en")], "language", "is given twice"),
        ([("prompt", "a" * 20_000)], "prompt", "longer than 10000 bytes"),
    ],
)
def test_wrong_fields_are_named(
    server: ModelServer, fields: list[tuple[str, str]], param: str, text: str
) -> None:
    status, error = call(server, *fields)
    assert (status, error["param"]) == (400, param)
    assert text in error["message"]


@pytest.mark.parametrize(
    ("file", "status", "text"),
    [
        (None, 400, "file: is empty or missing"),
        (b"", 400, "file: is empty or missing"),
        (b"not a sound", 400, "not readable audio"),
        (SOUND[: len(SOUND) // 2], 400, "the file is torn or damaged"),
        (make_sound(71), 400, r"longer than media.audio_max_seconds (70)"),
        (bytes(3_000_001), 413, "has more than 3000000 bytes (media.audio_max_bytes)"),
    ],
)
def test_wrong_files_are_refused(server: ModelServer, file: bytes | None, status: int, text: str) -> None:
    found, error = call(server, file=file)
    assert (found, error["param"]) == (status, "file")
    assert text in error["message"]


def test_other_endpoints_refuse_the_model_by_name(server: ModelServer) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
    ):
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        with caught.value as error:
            message = json.loads(error.read())["error"]["message"]
        assert "'tiny-whisper'" in message
        assert "transcripts of sound (/v1/audio/transcriptions)" in message or path == "/v1/embeddings"


def read(server: ModelServer, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=60) as response:
        return json.loads(response.read())


def test_lists_and_status_know_it(server: ModelServer) -> None:
    (listed,) = read(server, "/v1/models")["data"]
    assert (listed["id"], listed["tasks"], listed["max_model_len"]) == ("tiny-whisper", ["transcribe"], 32)
    before = read(server, "/v1/status")["transcription"]["finished"]
    call(server, file=make_sound(1))
    found = read(server, "/v1/status")["transcription"]
    assert found == {"running": 0, "waiting": 0, "finished": before + 1}


def test_a_client_that_leaves_ends_its_transcript(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves after the first of three windows, before which the others are not computed."""
    has_left, begun, step = threading.Event(), itertools.count(), TranscriptionSteps.step

    def step_on(steps: TranscriptionSteps) -> list[TokenEvent]:
        assert next(begun) == 0 or has_left.wait(PATIENCE)
        return step(steps)

    def read_counts() -> dict[str, int]:
        counts: dict[str, int] = read(server, "/v1/status")["transcription"]
        return counts

    monkeypatch.setattr(TranscriptionSteps, "step", step_on)
    before = read_counts()["finished"]
    data, kind = make_form([("stream", "true")], make_sound(65))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: read_counts()["running"] == 1)
    wait_until(lambda: not len(server.live))
    has_left.set()
    wait_until(lambda: read_counts()["running"] == 0)
    assert read_counts()["finished"] == before


def test_values_of_lists_are_limited(server: ModelServer) -> None:
    many = [("timestamp_granularities[]", "word")] * 10_000
    status, error = call(server, *many)
    assert status == 413 and "bytes beside its file" in error["message"]
