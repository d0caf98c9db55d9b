from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.openai.transcription import (
    PreparedTranscription,
    check_transcription_body,
    find_speech_model,
    read_form_fields,
    write_captions,
)
from mlxrun.api.prepared import PreparedRequest
from mlxrun.core.errors import RequestError
from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.transcription import SpeechModel, TimedWord, Transcript, TranscriptSegment
from tests.helpers.tokenizers import FakeModelInfo


def segment(start: float, end: float, text: str) -> TranscriptSegment:
    words = (TimedWord(text, start, end),)
    return TranscriptSegment(0, start, end, text, (1,), 0.0, -0.5, None, 0.1, words)


SEGMENTS = (segment(0.0, 1.5, " One."), segment(1.5, 1.5, ""), segment(3599.9996, 3661.25, " a --> b"))


def test_captions() -> None:
    spoken = [SEGMENTS[0], SEGMENTS[2]]
    assert write_captions(spoken, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:00:00,000 --> 01:01:01,250\na -> b\n"
    )
    assert write_captions(spoken, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n01:00:00.000 --> 01:01:01.250\na -> b\n"
    )
    assert write_captions([], "srt") == ""
    assert write_captions([], "vtt") == "WEBVTT\n"


def prepare(**given: Any) -> PreparedTranscription:
    prepared = PreparedRequest("transcription", (Request("r", (), SamplingParams()),), (), 0, "m")
    return PreparedTranscription(given, prepared, {"de": "german"}, 61.2)


def test_the_verbose_form_has_what_was_wanted() -> None:
    made = Transcript("One. a --> b", "de", SEGMENTS)
    found = prepare(response_format="verbose_json", timestamp_granularities=["word", "segment"]).build(made)
    assert isinstance(found, dict)
    assert (found["language"], found["duration"], found["usage"]["seconds"]) == ("german", 61.2, 62)
    assert found["words"] == [
        {"word": "One.", "start": 0.0, "end": 1.5},
        {"word": "a --> b", "start": 3599.9996, "end": 3661.25},
    ]
    assert [(each["id"], each["text"]) for each in found["segments"]] == [(0, " One."), (1, " a --> b")]
    assert found["segments"][0]["compression_ratio"] is None
    assert prepare(response_format="text").build(made) == "One. a --> b\n"


def test_values_of_a_form_get_their_types() -> None:
    given = {"stream": "true", "temperature": "0.5", "language": "de", "timestamp_granularities": ["word"]}
    expected = {"stream": True, "temperature": 0.5, "language": "de", "timestamp_granularities": ["word"]}
    assert read_form_fields(given) == expected
    assert read_form_fields({"stream": "false"}) == {"stream": False}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "file: missing"),
        ({"file": "a", "known_speaker_names": ["x"]}, "speakers are not told apart"),
        ({"file": "a", "chunking_strategy": {}}, 'chunking_strategy: not supported: only "auto"'),
        ({"file": "a", "timestamp_granularities": ["letter"]}, "timestamp_granularities"),
    ],
)
def test_bodies_that_no_model_takes(body: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        check_transcription_body(body)


def test_a_model_that_does_not_transcribe_is_named() -> None:
    with pytest.raises(RequestError, match="'fake' transcribes no sound"):
        find_speech_model(FakeModelInfo())
    speech = SpeechModel(16_000, {}, 448)
    assert find_speech_model(FakeModelInfo(speech=speech)) is speech
