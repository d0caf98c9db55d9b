"""Tokenizers without a tokenizer.json: of sentencepiece and tiktoken files, and what they need."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load import tokenizer_files
from mlxrun.model.load.tokenizer_files import find_vocabulary, load_tokenizer
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.sentencepiece_files import TEXTS, train

LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_folder(folder: Path, model_type: str = "llama", **tokenizer: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA | tokenizer))
    return folder


def load(folder: Path, **settings: Any) -> Any:
    return load_tokenizer(folder, ModelSettings(path=str(folder), **settings))


def test_a_sentencepiece_file_is_enough(zoo: Zoo, tmp_path: Path) -> None:
    """Its ids are those of sentencepiece, and the model runs with it."""
    from sentencepiece import SentencePieceProcessor

    folder = tmp_path / "model"
    shutil.copytree(zoo.text("llama"), folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    own = SentencePieceProcessor(model_file=str(train(folder)))
    assert find_vocabulary(folder) == "sentencepiece"
    tokenizer = load(folder)
    for text in TEXTS:
        assert tokenizer.encode(text.lstrip(), add_special_tokens=False) == own.encode(text.lstrip())
    ids = text_models.prompts(5, [20])[0]
    engine = engine_driver.make_real_engine(folder, load_check=False)
    event = engine_driver.run_requests(engine, [engine_driver.make_text_request("a", ids)])["a"]
    engine_driver.check_answer(event, zoo.answer("llama", ids))


def test_a_tokenizer_that_splits_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes a unigram vocabulary for Llama's merges, and makes other tokens of it."""
    train(make_folder(tmp_path), model_type="unigram")
    with pytest.raises(
        ModelLoadError, match=r"tokenizer\.model: .* LlamaTokenizer .* otherwise than sentence"
    ):
        load(tmp_path)
    monkeypatch.setattr(tokenizer_files, "compare_with_sentencepiece", lambda *given: None)  # mutation
    load(tmp_path)


def make_tiktoken(folder: Path) -> Path:
    """A tiktoken file of bytes and a few merges, as Llama 3's."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"12", b"123", "ä".encode()]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    return folder


def test_a_tiktoken_file_of_llama_3(tmp_path: Path) -> None:
    """Its ids are those of tiktoken."""
    import tiktoken

    added = {"262": {"content": "<|begin_of_text|>", "special": True}}
    folder = make_tiktoken(
        make_folder(
            tmp_path,
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token="<|begin_of_text|>",
            eos_token="<|begin_of_text|>",
            unk_token=None,
            added_tokens_decoder=added,
        )
    )
    assert find_vocabulary(folder) == "tiktoken"
    tokenizer = load(folder)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = {
        base64.b64decode(line.split()[0]): int(line.split()[1])
        for line in (folder / "tokenizer.model").read_text().splitlines()
    }
    own = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in [*TEXTS, "the then 12345 the"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == own.encode(text) and tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<|begin_of_text|>") == 262


def test_a_tiktoken_file_of_another_family_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would split its text by Llama 3's rule."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    folder = make_tiktoken(make_folder(tmp_path, "kimi_k2"))
    with pytest.raises(ModelLoadError, match=r"does not say how text is split.*model_type 'kimi_k2'"):
        load(folder)
    (folder / "tokenizer.model").rename(folder / "tiktoken.model")
    assert find_vocabulary(folder) == "tiktoken"


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    make_tiktoken(make_folder(tmp_path))
    with pytest.raises(ModelLoadError, match=r"tiktoken is needed: pip install 'mlxrun\[tiktoken\]'"):
        load(tmp_path)
    train(tmp_path)
    with pytest.raises(ModelLoadError, match="sentencepiece is needed: pip install sentencepiece"):
        load(tmp_path)


def test_a_tokenizer_that_is_code_is_not_run_unasked(tmp_path: Path) -> None:
    """The sentence says why, and what to set."""
    ran = tmp_path / "ran"
    make_folder(tmp_path, auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    (tmp_path / "own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    with pytest.raises(ModelLoadError, match=r"Python code of the model .* set model\.trust_remote_code"):
        load(tmp_path)
    assert not ran.exists()


def test_a_folder_without_any_vocabulary(tmp_path: Path) -> None:
    """What the library says then is about packages that would not help."""
    assert find_vocabulary(tmp_path) is None
    folder = make_folder(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert str(caught.value) == f"no tokenizer file in {folder} (tokenizer.json, tokenizer.model, ...)"
    (folder / "vocab.txt").write_text("a")
    with pytest.raises(ModelLoadError, match=r"there is no tokenizer\.json"):
        load(folder)


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "qwen.tiktoken", "tekken.json"])
def test_other_vocabularies_are_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    folder = text_models.build("llama", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / name).write_text("{}" if name.endswith("json") else "IQ== 0\n")
    shown = re.escape(name if "qwen" not in name else "*.tiktoken")
    with pytest.raises(ModelLoadError, match=rf"none can be made of {shown} .* save the tokenizer with"):
        load(folder)


def test_a_length_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = text_models.build("llama", tmp_path / "model") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "many"}))
    with pytest.raises(
        ModelLoadError, match="tokenizer_config.json: model_max_length: expected a number, got"
    ):
        load(path.parent)


@pytest.mark.parametrize(
    ("value", "said"), [("wide", "Field 'hidden_size' expected int, got str"), (65, "65")]
)
def test_a_wrong_config_is_not_blamed_on_the_tokenizer(tmp_path: Path, value: Any, said: str) -> None:
    path = text_models.build("llama", tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": value}))
    with pytest.raises(ModelLoadError) as caught:
        load(path.parent)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)
