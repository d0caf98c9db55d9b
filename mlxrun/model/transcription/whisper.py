"""Transcribes with mlx-audio's Whisper, one try at one window of 30 seconds at a time.

The library's `generate` computes a file in one call, for minutes. This is its loop over windows, in which
each try of a window is a step of its own. So files take turns, and one can be ended. The tests compare both.
Random numbers of a try depend on its window and temperature alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_audio.stt.models.whisper import Model, ModelConfig
from mlx_audio.stt.models.whisper.audio import (
    FRAMES_PER_SECOND,
    HOP_LENGTH,
    N_FRAMES,
    N_SAMPLES,
    SAMPLE_RATE,
    pad_or_trim,
)
from mlx_audio.stt.models.whisper.decoding import DecodingOptions
from mlx_audio.stt.models.whisper.timing import add_word_timestamps
from mlx_audio.utils import apply_quantization, load_weights

from mlxrun.config.settings import ModelSettings
from mlxrun.core.transcription import Recording, TimedWord, Transcript, TranscriptSegment
from mlxrun.model.load.footprint import count_weight_bytes
from mlxrun.model.load.load_progress import evaluate_parameters
from mlxrun.model.load.loader import check_digests, choose_dtype
from mlxrun.model.load.model_facts import GENERATION
from mlxrun.model.load.model_files import read_json
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load.tensor_files import name_file_errors
from mlxrun.model.load.weight_check import load_checked_weights

# What the library's `generate` does by default.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION, MIN_LOGPROB, MAX_SILENCE = 2.4, -1.0, 0.6
FORGETTING = 0.5  # a window that was sampled at more is no prompt for the next one
# Samples whose spectrum is computed in one call, and those on either side that its outer frames see too.
PART, EDGE = 64 * SAMPLE_RATE, 3 * HOP_LENGTH
RANGE = 2.0  # of the logarithms that the library keeps, below the largest


@dataclass(slots=True)
class WindowState:
    """How far a recording is. `mel`: its spectrum [frames + 3000, n_mels]; `seek`: the frame at which its
    next window begins; `tokens`: those of its prompt and of all segments; `attempt`: tries of this window
    that have failed; `sent`: characters of its text that are known."""

    recording: Recording
    mel: mx.array
    frames: int
    tokens: list[int] = field(default_factory=list)
    prompt_size: int = 0
    forgotten: int = 0  # tokens that are no prompt any more
    language: str = ""
    tokenizer: Any = None
    seek: int = 0
    attempt: int = 0
    speech_end: float = 0.0  # seconds, of the last word
    sent: int = 0

    @property
    def done(self) -> bool:
        return bool(self.language) and self.seek >= self.frames


class _KnownTokenizer:
    """A tokenizer whose vocabulary is made once: mlx-audio asks for it several times a window."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


class WhisperRunner:
    """Transcribes recordings with a loaded model. `nbytes`: of its weights."""

    def __init__(self, model: Any) -> None:
        self.nbytes = count_weight_bytes(model)
        self._model = model

    def start(self, recording: Recording) -> WindowState:
        """Compute the spectrum of a recording, with 30 seconds of silence after its end. The library computes
        it at once, which takes more than ten times the memory of the samples."""
        samples, parts = recording.samples, list[mx.array]()
        starts = range(0, max(len(samples) - EDGE, 1), PART)  # the last part is not shorter than an edge
        for start in starts:
            before, is_last = min(start, EDGE), start == starts[-1]
            own = samples[start - before : None if is_last else start + PART + EDGE]
            mel, _ = self._model._prepare_audio(own, N_SAMPLES if is_last else 0)
            first = before // HOP_LENGTH
            parts.append(mel[first : None if is_last else first + PART // HOP_LENGTH])
            mx.eval(parts)
        whole = mx.concatenate(parts)
        whole = mx.maximum(whole, whole.max() - RANGE)  # as the library does with what it computes at once
        mx.eval(whole)
        return WindowState(recording, whole, len(whole) - N_FRAMES)

    def advance(self, state: WindowState) -> Transcript:
        """Detect the language, or try the next window once. Return what is known more since."""
        if not state.language:
            return self._begin(state)
        window, size = self._cut_window(state)
        given = state.recording.temperature
        temperatures = (given,) if given else TEMPERATURES
        result = self._decode(state, window, temperatures[state.attempt])
        state.attempt += 1
        if _is_bad(result) and state.attempt < len(temperatures):
            return Transcript()
        state.attempt = 0
        segments = self._take(state, window, size, result)
        return Transcript(self._find_text(state), state.language, segments)

    def compute_trial(self) -> None:
        """Compute the logits of two tokens of a silent window, and wait for them."""
        window = mx.zeros((1, N_FRAMES, self._model.dims.n_mels), self._model.dtype)
        mx.eval(self._model(window, mx.array([[1, 1]])))

    def _begin(self, state: WindowState) -> Transcript:
        recording = state.recording
        state.language = self._model._detect_language(state.mel, recording.language)
        state.tokenizer = self._model.get_tokenizer(language=state.language)
        if recording.prompt.strip():
            state.tokens += state.tokenizer.encode(" " + recording.prompt.strip())
        state.prompt_size = len(state.tokens)
        return Transcript(language=state.language)

    def _cut_window(self, state: WindowState) -> tuple[mx.array, int]:
        """The next window [3000, n_mels], and how many of its frames are sound."""
        size = min(N_FRAMES, state.frames - state.seek)
        window = pad_or_trim(state.mel[state.seek : state.seek + size], N_FRAMES, axis=-2)
        return window.astype(self._model.dtype), size

    def _decode(self, state: WindowState, window: mx.array, temperature: float) -> Any:
        mx.random.seed(state.seek * len(TEMPERATURES) + state.attempt)
        options = DecodingOptions(
            language=state.language,
            temperature=temperature,
            prompt=state.tokens[state.forgotten :],
            fp16=self._model.dtype == mx.float16,
        )
        return self._model.decode(window, options)

    def _take(
        self, state: WindowState, window: mx.array, size: int, result: Any
    ) -> tuple[TranscriptSegment, ...]:
        """The segments of a window that is decoded. Moves to the next window: behind the last segment that is
        complete."""
        if result.no_speech_prob > MAX_SILENCE and not result.avg_logprob > MIN_LOGPROB:
            state.seek += size
            return ()
        start = state.seek
        found, passed, ends = self._split(result, start, size, state.tokenizer)
        state.seek += passed
        if state.recording.words:
            self._add_words(state, found, window, size, ends)
        if state.seek <= start:  # the library would try the same window for ever
            state.seek = start + size
        for segment in found:
            if segment["start"] == segment["end"] or not segment["text"].strip():
                segment |= {"text": "", "tokens": [], "words": []}
            state.tokens += segment["tokens"]
        if result.temperature > FORGETTING:
            state.forgotten = len(state.tokens)
        return tuple(map(_make_segment, found))

    def _split(
        self, result: Any, seek: int, size: int, tokenizer: Any
    ) -> tuple[list[dict[str, Any]], int, bool]:
        """The segments of a window that begins at frame `seek`, and the frames that they take. Last, whether
        its text ends with one time, so that no speech follows."""
        tokens, first = result.tokens, tokenizer.timestamp_begin
        stride = N_FRAMES // self._model.dims.n_audio_ctx  # frames of a step of time
        offset, step = seek / FRAMES_PER_SECOND, stride / FRAMES_PER_SECOND

        def make(start: float, end: float, ids: list[int]) -> dict[str, Any]:
            text = tokenizer.decode([token for token in ids if token < tokenizer.eot])
            names = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
            numbers = {name: getattr(result, name) for name in names}
            return {"seek": seek, "start": start, "end": end, "text": text, "tokens": ids, **numbers}

        is_time = [token >= first for token in tokens]
        ends = is_time[-2:] == [False, True]
        stops = [at for at in range(1, len(tokens)) if is_time[at - 1] and is_time[at]]
        if not stops:
            times = [token - first for token in tokens if token >= first]
            seconds = times[-1] * step if times and times[-1] else size / FRAMES_PER_SECOND
            return [make(offset, offset + seconds, tokens)], size, ends
        last = stops[-1]
        if ends:
            stops.append(len(tokens))
        parts = [tokens[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        found = [
            make(offset + (part[0] - first) * step, offset + (part[-1] - first) * step, part)
            for part in parts
        ]
        return found, size if ends else (tokens[last - 1] - first) * stride, ends

    def _add_words(
        self, state: WindowState, found: list[dict[str, Any]], window: mx.array, size: int, ends: bool
    ) -> None:
        """Add the times of words, which also correct those of segments and of the next window."""
        add_word_timestamps(
            segments=found,
            model=self._model,
            tokenizer=state.tokenizer,
            mel=window,
            num_frames=size,
            last_speech_timestamp=state.speech_end,
        )
        words = [word for segment in found for word in segment["words"]]
        end = words[-1]["end"] if words else found[-1]["end"]
        if not ends and end > found[0]["seek"] / FRAMES_PER_SECOND:
            state.seek = round(end * FRAMES_PER_SECOND)
        state.speech_end = end

    def _find_text(self, state: WindowState) -> str:
        """The text that is known more since the last call. A character may begin in one segment and end in
        the next."""
        text = state.tokenizer.decode(state.tokens[state.prompt_size :]).strip()
        if not state.done:
            text = text.rstrip("\ufffd")
        new = text[state.sent :]
        state.sent += len(new)
        return new

    def close(self) -> None:
        """Drop all arrays."""
        del self._model


def _is_bad(result: Any) -> bool:
    """Whether to try a window again: its text repeats itself or is unlikely, and it is not silent."""
    if result.no_speech_prob > MAX_SILENCE and result.avg_logprob < MIN_LOGPROB:
        return False
    return bool(result.compression_ratio > MAX_COMPRESSION or result.avg_logprob < MIN_LOGPROB)


def _make_segment(found: Mapping[str, Any]) -> TranscriptSegment:
    numbers = {name: found[name] for name in ("avg_logprob", "compression_ratio", "no_speech_prob")}
    return TranscriptSegment(
        seek=found["seek"],
        start=found["start"],
        end=found["end"],
        text=found["text"],
        tokens=tuple(found["tokens"]),
        temperature=found["temperature"],
        words=tuple(TimedWord(word["word"], word["start"], word["end"]) for word in found.get("words", ())),
        **{name: float(value) if math.isfinite(value) else None for name, value in numbers.items()},
    )


def load_whisper(settings: ModelSettings, info: LoadedModelInfo) -> WhisperRunner:
    """Load a model's weights. ModelLoadError if they do not fit its config."""
    dtype = choose_dtype(settings) or mx.float16
    with name_file_errors(info.folder):
        model = Model(ModelConfig.from_dict(dict(info.config)), dtype)
        weights = model.sanitize(load_weights(info.folder))
        apply_quantization(model, dict(info.config), weights, None)
        wanted = dict(tree_flatten(model.parameters()))
        load_checked_weights(model, {name: weights[name] for name in wanted if name in weights}, info.folder)
        heads = read_json(info.folder / GENERATION).get("alignment_heads")
        if heads:
            model.set_alignment_heads(heads)
    model.eval()
    model._processor = SimpleNamespace(tokenizer=_KnownTokenizer(info.tokenizer))
    evaluate_parameters(model, info.name)
    check_digests(settings, info)
    return WhisperRunner(model)
