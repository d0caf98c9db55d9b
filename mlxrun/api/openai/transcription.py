"""Bodies of /v1/audio/transcriptions (OpenAI's), and their responses and events.

A server gets the fields as a form. A line of a job has them as JSON, with `file` as a path or a data URL.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from mlxrun.api.body_schema import BOOL, STRING, Accepted, BodySchema
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text.media.recordings import load_recording
from mlxrun.api.text.model_info import ModelInfo, choose_adapter
from mlxrun.api.text.prompt import check_text
from mlxrun.api.text.templates.template import ImageMarkers
from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import check_given, reject, reject_choice, reject_unsupported
from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.transcription import Recording, SpeechModel, Transcript, TranscriptSegment

TRANSCRIPTION_URL = "/v1/audio/transcriptions"
WORDS, SEGMENTS = "word", "segment"
TEXTS = ("text", "srt", "vtt")  # of `response_format`
_SPEAKERS = "speakers are not told apart"
_HARMLESS: Accepted = {
    "chunking_strategy": ({"const": "auto"}, "the model divides the sound into windows of 30 s itself"),
    "user": (STRING, "it identifies the end user"),
}
TRANSCRIPTION = BodySchema(
    {
        "model": STRING,
        "file": STRING,
        "language": STRING,
        "prompt": STRING,
        "response_format": {"enum": ["json", "verbose_json", *TEXTS]},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "timestamp_granularities": {"type": "array", "items": {"enum": [WORDS, SEGMENTS]}, "maxItems": 2},
        "stream": BOOL,
    },
    _HARMLESS,
    {
        "include": "transcripts have no logprobs",
        "known_speaker_names": _SPEAKERS,
        "known_speaker_references": _SPEAKERS,
    },
)
LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
_EVENT = "transcript.text"


@dataclass(frozen=True, slots=True)
class PreparedTranscription:
    """A checked body. `prepared` has the one Request; `languages`: the names of languages by code; `seconds`:
    the length of the sound."""

    given: Mapping[str, Any]
    prepared: PreparedRequest
    languages: Mapping[str, str]
    seconds: float

    def build(self, made: Transcript) -> str | dict[str, Any]:
        """Build the response to a whole transcript: a text or a JSON object."""
        kind = self.given.get("response_format", "json")
        segments = [segment for segment in made.segments if segment.text.strip()]
        if kind == "text":
            return f"{made.text}\n"
        if kind in ("srt", "vtt"):
            return write_captions(segments, kind)
        usage = {"type": "duration", "seconds": math.ceil(self.seconds)}
        if kind == "json":
            return {"text": made.text, "usage": usage}
        wanted = self.given.get("timestamp_granularities") or [SEGMENTS]
        found: dict[str, Any] = {
            "task": "transcribe",
            "language": self.languages.get(made.language, "english"),
            "duration": round(self.seconds, 3),
            "text": made.text,
        }
        if WORDS in wanted:
            words = (word for segment in segments for word in segment.words)
            found["words"] = [{**word._asdict(), "word": word.word.strip()} for word in words]
        if SEGMENTS in wanted:
            found["segments"] = [_describe_segment(at, each) for at, each in enumerate(segments)]
        return {**found, "usage": usage}

    def write_delta(self, made: Transcript) -> dict[str, Any]:
        """Make the event of a part of the text."""
        return {"type": f"{_EVENT}.delta", "delta": made.text}

    def write_end(self, made: Transcript) -> dict[str, Any]:
        """Make the last event, of the whole transcript."""
        usage = {"type": "duration", "seconds": math.ceil(self.seconds)}
        return {"type": f"{_EVENT}.done", "text": made.text, "usage": usage}


def _describe_segment(at: int, segment: TranscriptSegment) -> dict[str, Any]:
    found = asdict(segment)
    del found["words"]
    return {"id": at, **found}


def write_captions(segments: Sequence[TranscriptSegment], kind: str) -> str:
    """Write segments as captions: `srt` (SubRip) or `vtt` (WebVTT)."""
    blocks = ["WEBVTT\n"] if kind == "vtt" else []
    for at, segment in enumerate(segments, 1):
        times = " --> ".join(_format_time(each, kind) for each in (segment.start, segment.end))
        text = segment.text.strip().replace("-->", "->")  # which would be taken for times
        head = [str(at)] if kind == "srt" else []
        blocks.append("\n".join([*head, times, text, ""]))
    return "\n".join(blocks)


def _format_time(seconds: float, kind: str) -> str:
    minutes, left = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    mark = "," if kind == "srt" else "."
    return f"{hours:02}:{minutes:02}:{left // 1000:02}{mark}{left % 1000:03}"


def read_form_fields(fields: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """Return the body of a form: the values of some fields are no strings."""
    body: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "stream" and value in ("true", "false"):
            body[name] = value == "true"
        elif name == "temperature" and isinstance(value, str):
            try:
                body[name] = float(value)
            except ValueError:
                reject(name, "expected a number", code="invalid_type")
        else:
            body[name] = value
    return body


def check_transcription_body(body: Any, *, strict: bool = False) -> dict[str, Any]:
    """Return the fields of a body that have an effect. RequestError if one is wrong for every model."""
    given = TRANSCRIPTION.check(body, strict=strict)
    check_given(given, "file")
    kind = given.get("response_format", "json")
    if "timestamp_granularities" in given and kind != "verbose_json":
        reject("timestamp_granularities", f"needs response_format verbose_json, not {kind}")
    if given.get("stream") and kind not in ("json", "text"):
        reject("stream", f"is not supported with response_format {kind}: its events have only text")
    return given


def check_transcription_line(body: Any) -> None:
    """Check the body of a job's line. RequestError as `check_transcription_body`, and if the response would
    be a text."""
    kind = check_transcription_body(body).get("response_format")
    if kind in TEXTS:
        reject("response_format", f"{kind} is no JSON: a line takes json and verbose_json")


def find_speech_model(model_info: ModelInfo) -> SpeechModel:
    """Return how the model transcribes. RequestError if it does not."""
    if model_info.speech is None:
        text = f"model: {model_info.name!r} transcribes no sound; a model of the family Whisper does"
        raise RequestError(text, param="model", code="unsupported_model")
    return model_info.speech


@asynccontextmanager
async def prepare_transcription(
    body: Any, context: ApiContext, data: bytes | None = None
) -> AsyncIterator[PreparedTranscription]:
    """Check a body and read its sound, for use within the block, in which the memory of the sound counts.
    RequestError if the body is refused, MediaError if the sound is. `data`: the file's bytes, if they were
    sent; else `file` is a URL or a path."""
    model_info = context.model_info
    given = check_transcription_body(body, strict=context.config.server.strict_fields)
    choose_adapter(given.get("model"), model_info)
    speech = find_speech_model(model_info)
    prompt = _check_prompt(given.get("prompt", ""), model_info)
    language = _find_language(given, speech)
    sources = context.media_loader, context.config
    async with load_recording(given["file"], "file", speech.rate, *sources, data) as samples:
        recording = Recording(
            samples,
            language,
            prompt,
            float(given.get("temperature", 0.0)),
            WORDS in given.get("timestamp_granularities", ()),
        )
        name = f"{secrets.token_hex(12)}-0"
        request = Request(name, (), SamplingParams(max_tokens=0), recording=recording)
        prepared = PreparedRequest(
            "transcription",
            (request,),
            stops=(),
            seed=0,
            model=model_info.name,
            stream=bool(given.get("stream")),
        )
        yield PreparedTranscription(given, prepared, speech.languages, len(samples) / speech.rate)


def _find_language(given: Mapping[str, Any], speech: SpeechModel) -> str | None:
    """The code of the language that the body names by its code or its name."""
    if "language" not in given:
        return None
    name: str = given["language"].strip().lower()
    if not speech.languages:
        if name not in ("en", "english"):
            reject_unsupported("language", "this model knows only English (en)")
        return "en"
    codes = {language: code for code, language in speech.languages.items()}
    code = codes.get(name, name)
    if code not in speech.languages:
        reject_choice("language", given["language"], speech.languages)
    return code


def _check_prompt(prompt: str, model_info: ModelInfo) -> str:
    """The prompt, in which special tokens would change what the model does."""
    check_text(prompt, "prompt", ImageMarkers())
    tokenizer = model_info.tokenizer
    for token in tokenizer.encode(prompt, add_special_tokens=False):
        if token >= tokenizer.eos_token_id:  # as all tokens of Whisper that are no text
            reject("prompt", f"contains the special token {tokenizer.convert_ids_to_tokens(token)!r}")
    return prompt
