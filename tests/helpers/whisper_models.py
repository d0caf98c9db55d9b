"""Tiny Whisper models with random weights, as folders that mlx-audio loads, and sounds for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.tiny.byte_tokenizer import write_json

RATE = 16_000
TEXT_TOKENS = {True: 50_257, False: 600}  # multilingual or not; mlx-audio tells it by the size
TIMESTAMPS = 1501
# The text depends on the sound only if its attention looks at few places, and speaks louder than the text.
CROSS = {"query.weight": 6.0, "out.weight": 4.0}


def write_whisper(
    folder: Path, *, multilingual: bool = False, seed: int = 0, sharpness: float = 8.0, **changes: Any
) -> Path:
    """Write a model in float32. `sharpness`: of its tokens' probabilities; `changes`: of its config."""
    from mlx_audio.stt.models.whisper import Model, ModelConfig

    specials = list_special_tokens(multilingual)
    size = TEXT_TOKENS[multilingual] + len(specials)
    config = {
        "model_type": "whisper",
        **{"n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 16, "n_audio_head": 2, "n_audio_layer": 1},
        **{"n_vocab": size, "n_text_ctx": 32, "n_text_state": 16, "n_text_head": 2, "n_text_layer": 2},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    model = Model(ModelConfig.from_dict(dict(config)), mx.float32)
    rng = np.random.default_rng(seed)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        noise = rng.standard_normal(value.shape)
        if name == "decoder.token_embedding.weight":
            noise *= 0.3
            noise[:256] *= 0.3  # single bytes, which are no characters by themselves
            # Times are seldom, and late ones are unlikely: after a time another one may be forbidden.
            noise[-TIMESTAMPS:, -1] = -5 - 10 * np.linspace(0, 1, TIMESTAMPS)
        elif name == "decoder.ln.weight":
            noise = 0.1 * noise + sharpness
            noise[-1] = 0
        elif name == "decoder.ln.bias":
            noise = 0.1 * noise
            noise[-1] = 1
        elif value.ndim < 2:
            noise = 0.1 * noise + (name.endswith("weight") and "ln" in name)
        else:
            noise *= 1.6 / np.sqrt(np.prod(value.shape[1:]))
            noise *= CROSS.get(name.rpartition("cross_attn.")[2], 1.0)
        weights[name] = mx.array(noise.astype(np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _save_tokenizer(folder, TEXT_TOKENS[multilingual], specials)
    return folder


def list_special_tokens(multilingual: bool) -> list[str]:
    """The tokens behind those of text, in Whisper's order."""
    from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES

    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:99] if multilingual]
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    times = [f"<|{at * 0.02:.2f}|>" for at in range(TIMESTAMPS)]
    words = [f"<|{task}|>" for task in tasks]
    return ["<|endoftext|>", "<|startoftranscript|>", *languages, *words, *times]


def _save_tokenizer(folder: Path, size: int, specials: list[str]) -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: at for at, letter in enumerate(sorted(letters))}
    syllables = [a + b for a in "bdfglmnprst" for b in "aeiou"]
    for at in range(len(vocabulary), size):
        number, word = at, "Ġ" if at % 3 else ""
        while number:
            number, digit = divmod(number, len(syllables))
            word += syllables[digit]
        vocabulary[word] = at
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    shape = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **shape}), encoding="utf-8")


def make_speech(seconds: float, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Make samples, RATE a second, whose spectrum changes all the time."""
    rng = np.random.default_rng(seed)
    at = np.arange(round(seconds * RATE)) / RATE
    pitch = rng.uniform(80, 2000, int(seconds) + 2)
    bend = np.interp(at, np.arange(len(pitch)), pitch)
    wave = np.sin(2 * np.pi * np.cumsum(bend) / RATE) + 0.2 * rng.standard_normal(len(at))
    return (0.3 * wave).astype(np.float32)
