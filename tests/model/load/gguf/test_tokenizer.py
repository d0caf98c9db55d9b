"""The tokenizer of a GGUF file makes the tokens of the one that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.gguf.header import read_header
from mlxrun.model.load.gguf.tokenizer import make_tokenizer
from tests.helpers.gguf_files import write_gguf
from tests.helpers.sentencepiece_files import TEXTS, train

TYPES = {"NORMAL": 1, "UNKNOWN": 2, "CONTROL": 3, "USER_DEFINED": 4, "UNUSED": 5, "BYTE": 6}


def load(folder: Path, metadata: dict[str, Any]) -> Any:
    given = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return make_tokenizer(read_header(write_gguf(folder / "m.gguf", given, {})))


def train_bpe(splitter: Any) -> Any:
    """A byte-level BPE with a special token, and one that is only never split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = splitter
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken("<|im_start|>", normalized=False)])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


def describe(made: Any, pre: str) -> dict[str, Any]:
    own = json.loads(made.to_str())
    tokens = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    kinds = {"<|im_start|>": 3, "<think>": 4}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(merge) for merge in own["model"]["merges"]],
        "token_type": [kinds.get(token, 1) for token in tokens],
        "bos_token_id": tokens.index("<|im_start|>"),
    }


def make_splitter(pre: str) -> Any:
    """As the tokenizer.json of such a model splits text."""
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return words
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    numbers = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}[pre]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), last])


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_a_byte_level_tokenizer(tmp_path: Path, pre: str) -> None:
    made = train_bpe(make_splitter(pre))
    loaded = load(tmp_path, describe(made, pre))
    for text in [*TEXTS, "<|im_start|>user\n<think>12345</think>"]:
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == made.encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids) == text
    begins = loaded.encode("a")[0] == loaded.bos_token_id
    assert begins == (pre == "llama-bpe")


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [2]), ("gpt-2", [0, 1])])
def test_words_that_no_merges_lead_to(tmp_path: Path, pre: str, ids: list[int]) -> None:
    """Llama 3 takes them whole; others only get there by merges."""
    loaded = load(tmp_path, {"model": "gpt2", "pre": pre, "tokens": ["h", "i", "hi"], "merges": []})
    assert loaded.encode("hi", add_special_tokens=False) == ids


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer(tmp_path: Path, prefix: bool) -> None:
    """The ids are those of sentencepiece itself."""
    from sentencepiece import SentencePieceProcessor

    made = SentencePieceProcessor(model_file=str(train(tmp_path, add_dummy_prefix=prefix)))
    size = made.get_piece_size()
    kinds = [
        2 if made.is_unknown(i) else 3 if made.is_control(i) else 6 if made.is_byte(i) else 1
        for i in range(size)
    ]
    metadata = {
        "model": "llama",
        "tokens": [made.id_to_piece(i) for i in range(size)],
        "scores": [made.get_score(i) for i in range(size)],
        "token_type": kinds,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": prefix,
    }
    loaded = load(tmp_path, metadata)
    for text in TEXTS:
        ids = loaded.encode(text)
        assert ids == [1, *made.encode(text)]
        assert loaded.decode(ids, skip_special_tokens=True) == made.decode(ids[1:])


def test_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    tokens = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"]}
    with pytest.raises(ModelLoadError, match="the tokens and merges do not fit"):
        load(tmp_path, tokens | {"merges": ["a c"]})
    with pytest.raises(ModelLoadError, match=r"eos_token_id is 7, of 2 tokens"):
        load(tmp_path, tokens | {"eos_token_id": 7})
    with pytest.raises(ModelLoadError, match="1 scores of 2 tokens"):
        load(tmp_path, {"model": "llama", "tokens": ["a", "b"], "scores": [0.5]})
    with pytest.raises(ModelLoadError, match=r"tokens has 1, which is not a str"):
        load(tmp_path, tokens | {"tokens": [1, 2]})
    with pytest.raises(ModelLoadError, match=r"merges has 1, which is not a str"):
        load(tmp_path, tokens | {"merges": [1]})
