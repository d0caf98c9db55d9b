"""The loop over windows gives what mlx-audio's own `generate` gives, on the same samples, in float32."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.transcript import Recording, Transcript
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.transcription.whisper import WhisperRunner, load_whisper
from tests.helpers.whisper_models import make_speech, write_whisper

NUMBERS = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper") / "tiny")


def load(folder: Path, dtype: Literal["float32", "float16"] = "float32") -> WhisperRunner:
    settings = ModelSettings(path=str(folder), dtype=dtype)
    return load_whisper(settings, load_model_info(settings, weights=True))


@pytest.fixture(scope="module")
def runner(folder: Path) -> WhisperRunner:
    """One whose tries all begin with the same random state, so that those of the library can be compared."""
    runner = load(folder)
    model, decode = runner._model, runner._model.decode

    def decode_alike(window: mx.array, options: Any) -> Any:
        mx.random.seed(5)
        return decode(window, options)

    model.decode = decode_alike
    return runner


def transcribe(runner: WhisperRunner, *recordings: Recording) -> list[Transcript]:
    """Each recording has a turn in each round."""
    states = [runner.start(recording) for recording in recordings]
    made = [Transcript() for _ in recordings]
    while any(not state.done for state in states):
        for at, state in enumerate(states):
            if not state.done:
                made[at] = made[at].join(runner.advance(state))
    return made


def generate(runner: WhisperRunner, samples: Any, **options: Any) -> Any:
    """What the library makes of samples."""
    return runner._model.generate(samples, fp16=False, **options)


def same(mine: Transcript, library: Any) -> None:
    assert mine.text == library.text.strip()
    assert mine.language == library.language
    assert [(s.seek, s.start, s.end, s.text, list(s.tokens)) for s in mine.segments] == [
        (s["seek"], s["start"], s["end"], s["text"], s["tokens"]) for s in library.segments
    ]
    for name in NUMBERS:
        theirs = [float(s[name]) for s in library.segments]
        assert [getattr(s, name) for s in mine.segments] == [x if math.isfinite(x) else None for x in theirs]
    words = [[(w["word"], w["start"], w["end"]) for w in s.get("words", ())] for s in library.segments]
    assert [list(s.words) for s in mine.segments] == words


@pytest.mark.parametrize("seconds", [0.005, 30.0, 47.3])
@pytest.mark.parametrize("words", [False, True])
def test_it_is_the_librarys_transcript(runner: WhisperRunner, seconds: float, words: bool) -> None:
    samples = make_speech(seconds, seed=int(seconds))
    (mine,) = transcribe(runner, Recording(samples, words=words))
    same(mine, generate(runner, samples, word_timestamps=words))


def test_windows_that_come_out_badly_are_tried_again(tmp_path: Path) -> None:
    runner = load(write_whisper(tmp_path / "unsure", sharpness=0.5))
    samples = make_speech(3)
    model, decode = runner._model, runner._model.decode
    tried = []

    def decode_alike(window: mx.array, options: Any) -> Any:
        mx.random.seed(5)
        tried.append(options.temperature)
        return decode(window, options)

    model.decode = decode_alike
    (mine,) = transcribe(runner, Recording(samples))
    assert tried == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    same(mine, generate(runner, samples))
    assert {segment.temperature for segment in mine.segments} == {1.0}


def test_prompt_and_temperature_are_the_librarys(runner: WhisperRunner) -> None:
    samples = make_speech(34, seed=7)
    plain, prompted, warm = transcribe(
        runner,
        Recording(samples),
        Recording(samples, prompt=" tade goda "),
        Recording(samples, temperature=0.7),
    )
    same(prompted, generate(runner, samples, initial_prompt="tade goda"))
    same(warm, generate(runner, samples, temperature=0.7))
    assert len({plain.text, prompted.text, warm.text}) == 3


def test_half_precision_is_the_librarys(folder: Path) -> None:
    runner = load(folder, "float16")
    samples = make_speech(31, seed=3)
    (mine,) = transcribe(runner, Recording(samples))
    assert {segment.temperature for segment in mine.segments} == {0.0}
    same(mine, runner._model.generate(samples))


def test_a_recording_gives_the_same_in_company(folder: Path) -> None:
    runner = load(folder)
    recordings = [Recording(make_speech(31, seed), temperature=0.9) for seed in range(2)]
    alone = [transcribe(runner, each)[0] for each in recordings]
    assert transcribe(runner, *recordings) == alone
    assert alone[0].text != alone[1].text


def test_the_language_is_the_librarys(tmp_path: Path) -> None:
    runner = load(write_whisper(tmp_path / "many", multilingual=True))
    samples = make_speech(5)
    found, given = transcribe(runner, Recording(samples), Recording(samples, language="fr"))
    assert found.language == generate(runner, samples, temperature=0.0).language != "en"
    assert given.language == "fr"
    assert given.text != found.text


def test_text_of_parts_is_the_text(runner: WhisperRunner) -> None:
    """A character whose bytes are in two segments is sent once it is complete."""
    state = runner.start(Recording(make_speech(1)))
    runner.advance(state)
    encode = state.tokenizer.encode
    sent = ""
    for token in encode(" caf\u00e9 \u65e5\u672c"):
        state.tokens.append(token)
        sent += runner._find_text(state)
        assert "\ufffd" not in sent
    assert sent == "caf\u00e9 \u65e5\u672c"


def test_a_window_without_progress_is_left(runner: WhisperRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would try it for ever."""
    state = runner.start(Recording(make_speech(40)))
    runner.advance(state)
    first = state.tokenizer.timestamp_begin
    tokens = [first, 300, first, first]
    result = SimpleNamespace(
        tokens=tokens, temperature=0.0, avg_logprob=-0.1, compression_ratio=1.0, no_speech_prob=0.0
    )
    monkeypatch.setattr(runner._model, "decode", lambda window, options: result)
    runner.advance(state)
    assert state.seek == 3000
    runner.advance(state)
    assert state.done


@pytest.mark.parametrize(("name", "shape"), [("decoder.ln.weight", None), ("decoder.ln.weight", (3,))])
def test_weights_that_do_not_fit_are_named(
    folder: Path, tmp_path: Path, name: str, shape: tuple[int, ...] | None
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    weights = dict(mx.load(str(bad / "model.safetensors")))
    if shape is None:
        del weights[name]
    else:
        weights[name] = mx.zeros(shape)
    mx.save_safetensors(str(bad / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError, match=f"bad: the model cannot be loaded: 1 tensors .* {name}"):
        load(bad)


def test_heads_that_time_words_are_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "heads"
    shutil.copytree(folder, other)
    (other / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, 1]]}))
    assert load(other)._model.alignment_heads.tolist() == [[0, 1]]
