"""The loop over windows gives what mlx-audio's own `generate` gives, on the same samples, in float32."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_audio.stt.models.whisper.audio import log_mel_spectrogram

from benchmarks.tiny.byte_tokenizer import write_json
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.transcription import Recording, Transcript
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.transcription import whisper
from mlxrun.model.transcription.whisper import EDGE, WhisperRunner, load_whisper
from tests.helpers.whisper_models import RATE, make_speech, write_whisper

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


def test_a_trial_computes_without_a_recording_and_raises_what_the_model_raises(folder: Path) -> None:
    runner = load(folder, "float16")
    runner.compute_trial()

    def fail(*rest: object) -> mx.array:
        raise RuntimeError("the device is gone")

    runner._model.encoder = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.compute_trial()


@pytest.mark.parametrize("count", [0, 1, -1, EDGE - 1, EDGE, EDGE + 1, 3 * EDGE])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_spectrum_is_the_librarys_and_computed_in_parts(
    runner: WhisperRunner, monkeypatch: pytest.MonkeyPatch, parts: int, count: int
) -> None:
    """Also where a part is silent beside the others, and where the last one is short. At once it would take
    ten times the memory of the samples."""
    part, compute = RATE, log_mel_spectrogram
    monkeypatch.setattr(whisper, "PART", part)
    samples = make_speech(parts + 1, seed=parts)[: parts * part + count]
    samples[: part // 2] *= 1e-4
    mel, frames = runner._model._prepare_audio(samples)
    given: list[int] = []
    monkeypatch.setattr(
        "mlx_audio.stt.models.whisper.whisper.log_mel_spectrogram",
        lambda audio, **options: given.append(len(audio)) or compute(audio, **options),
    )
    state = runner.start(Recording(samples))
    assert state.frames == frames and mx.array_equal(state.mel, mel).item()
    assert len(given) == parts + (count > EDGE) and max(given) <= part + 2 * EDGE


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
    with pytest.raises(ModelLoadError, match=f"bad: .*{name}"):
        load(bad)


def test_heads_that_time_words_are_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "heads"
    shutil.copytree(folder, other)
    (other / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, 1]]}))
    assert load(other)._model.alignment_heads.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("generation_config.json", "alignment_heads", [["a", "b"]]),
        ("generation_config.json", "alignment_heads", "abc"),
        ("config.json", "n_mels", 0),
        ("config.json", "n_audio_state", 3),
        ("config.json", "n_vocab", None),
    ],
)
def test_a_value_that_nothing_can_be_made_of_names_the_folder(
    folder: Path, tmp_path: Path, file: str, key: str, value: Any
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    own = json.loads((bad / file).read_text()) if (bad / file).exists() else {}
    write_json(bad / file, own | {key: value})
    with pytest.raises(ModelLoadError, match="bad: the model cannot be loaded: "):
        load(bad)


def write_quantized(folder: Path) -> None:
    write_whisper(folder, n_audio_state=64, n_text_state=64)
    model = load(folder)._model
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization": {"group_size": 32, "bits": 4}})


NAMES = {  # of transformers, by those of mlx-audio
    ".blocks.": ".layers.",
    ".attn_ln.": ".self_attn_layer_norm.",
    ".cross_attn_ln.": ".encoder_attn_layer_norm.",
    ".mlp_ln.": ".final_layer_norm.",
    ".attn.": ".self_attn.",
    ".cross_attn.": ".encoder_attn.",
    ".query.": ".q_proj.",
    ".key.": ".k_proj.",
    ".value.": ".v_proj.",
    ".out.": ".out_proj.",
    ".mlp1.": ".fc1.",
    ".mlp2.": ".fc2.",
    "encoder.ln_post.": "encoder.layer_norm.",
    "decoder.ln.": "decoder.layer_norm.",
    "decoder.token_embedding.": "decoder.embed_tokens.",
    "decoder.positional_embedding": "decoder.embed_positions.weight",
}


def write_as_transformers(folder: Path) -> None:
    write_whisper(folder)
    weights = {"model.encoder.embed_positions.weight": mx.zeros((1500, 16))}
    for name, value in dict(mx.load(str(folder / "model.safetensors"))).items():
        for mine, theirs in NAMES.items():
            name = name.replace(mine, theirs)
        weights[f"model.{name}"] = value.transpose(0, 2, 1) if value.ndim == 3 else value
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": config["n_vocab"]}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    others = {"num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 32}
    write_json(folder / "config.json", {"model_type": "whisper", **sizes, **heads, **others})


@pytest.mark.parametrize("write", [write_quantized, write_as_transformers])
@pytest.mark.filterwarnings("ignore:Could not load WhisperProcessor")
def test_weights_are_those_that_the_library_loads(write: Callable[[Path], None], tmp_path: Path) -> None:
    from mlx_audio.stt import load as load_with_library

    write(tmp_path / "any")
    mine = dict(tree_flatten(load(tmp_path / "any", "float16")._model.parameters()))
    library = dict(tree_flatten(load_with_library(tmp_path / "any").parameters()))
    assert mine.keys() == library.keys()
    assert all(mx.array_equal(mine[name], library[name]) for name in mine)
    assert all(mine[name].dtype == library[name].dtype for name in mine)
    assert any("scales" in name for name in mine) == (write is write_quantized)


def test_a_checkpoint_of_transformers_gives_the_same(folder: Path, tmp_path: Path) -> None:
    write_as_transformers(tmp_path / "any")
    recording = Recording(make_speech(2), words=True)
    assert transcribe(load(tmp_path / "any"), recording) == transcribe(load(folder), recording)
