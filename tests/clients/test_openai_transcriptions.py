"""OpenAI's own client on a tiny Whisper: transcripts as JSON, text and verbose JSON, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest
from openai import OpenAI

from mlxrun.config.settings import Config, ModelSettings
from tests.helpers.audio_files import make_wav
from tests.helpers.served_model import ModelServer, run_model_server
from tests.helpers.whisper_models import RATE, make_speech, write_whisper

SOUND = ("memo.wav", make_wav(np.round(make_speech(33) * 20_000).astype(np.int16)[:, None], RATE))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = write_whisper(tmp_path_factory.mktemp("model") / "tiny-whisper")
    with run_model_server(Config(model=ModelSettings(path=str(folder)))) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def test_json_text_and_captions(client: OpenAI) -> None:
    create = client.audio.transcriptions.create
    plain = create(model="whisper-1", file=SOUND)
    assert plain.text
    assert plain.usage is not None
    assert (plain.usage.type, plain.usage.seconds) == ("duration", 33)
    assert create(model="whisper-1", file=SOUND, response_format="text") == f"{plain.text}\n"
    assert str(create(model="whisper-1", file=SOUND, response_format="vtt")).startswith("WEBVTT")


def test_verbose_json(client: OpenAI) -> None:
    found = client.audio.transcriptions.create(
        model="whisper-1",
        file=SOUND,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="en",
        prompt="tade",
        temperature=0.2,
    )
    assert (found.duration, found.language) == (33, "english")
    assert found.segments
    assert found.words
    assert found.segments[0].temperature == 0.2
    assert "".join(segment.text for segment in found.segments).strip() == found.text


def test_a_stream(client: OpenAI) -> None:
    create = client.audio.transcriptions.create
    *deltas, last = create(model="whisper-1", file=SOUND, stream=True)
    assert last.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == last.text
    assert last.text == create(model="whisper-1", file=SOUND).text


def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not readable audio") as caught:
        client.audio.transcriptions.create(model="whisper-1", file=("a.mp3", b"nothing"))
    assert (caught.value.param, caught.value.code) == ("file", "invalid_audio")
    with pytest.raises(openai.NotFoundError, match="/v1/audio/translations is not supported"):
        client.post("/audio/translations", cast_to=object)


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-whisper"]
