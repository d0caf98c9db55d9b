"""Trains a tiny sentencepiece model, with the settings of Llama's: BPE, bytes, no normalisation of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXTS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    " A leading space,  two spaces and 1234567.89",
    "def f(x):\n    return x ** 2  # äöü ß éè\n\n",
    "日本語 と 中文, Привет мир 🙂",
    "12 345 6789 words'll be WORDS\tand\r\nmore",
]


def train(folder: Path, **options: Any) -> Path:
    """Write FOLDER/tokenizer.model. `options` of the trainer."""
    from sentencepiece import SentencePieceTrainer

    given: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "minloglevel": 2,
        "num_threads": 1,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4), model_prefix=str(folder / "tokenizer"), **(given | options)
    )
    return folder / "tokenizer.model"
