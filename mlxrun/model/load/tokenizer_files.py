"""Loads a model's tokenizer: tokenizer.json, or what transformers makes of a sentencepiece or tiktoken file.

A converted tokenizer is compared with the file's own library. The conversion depends on the class in
tokenizer_config.json, and a wrong one silently splits text into other tokens.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_files import read_json

VocabularyKind = Literal["sentencepiece", "tiktoken"]
_INSTALL = {"sentencepiece": "sentencepiece", "tiktoken": "'mlxrun[tiktoken]'"}
# A tiktoken file has no rule by which text is split first; transformers applies Llama 3's to every one.
_TIKTOKEN_FAMILIES = ("llama", "mllama")
# Of these a tokenizer can be made only if tokenizer_config.json names the right class, or not at all.
_OTHER_VOCABULARIES = ("sentencepiece.bpe.model", "spiece.model", "*.tiktoken", "tekken.json", "vocab.json")
_ANY_TOKENIZER = ("*.model", "*vocab*", "tokenization*.py")  # and those above
# None begins with a space: before it, transformers leaves out the space that sentencepiece adds, on purpose.
SAMPLES = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?",
    "Two  spaces  and 1234567.89",
    "def f(x):\n    return x ** 2  # äöü ß éè\n\n",
    "日本語 と 中文, Привет мир, العربية 🙂",
)


def load_tokenizer(folder: Path, settings: ModelSettings) -> Any:
    """The folder's fast tokenizer. ModelLoadError if there is none, or if it makes no tokens of text."""
    from transformers import AutoTokenizer

    _check_templates(folder)
    kind = None if (folder / "tokenizer.json").is_file() else find_vocabulary(folder)
    if kind is not None:
        _check_convertible(folder, kind)
    if not settings.trust_remote_code:
        _check_code(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # the library raises bare exceptions for damaged files
        raise ModelLoadError(_explain_no_tokenizer(folder, error)) from error
    if not tokenizer.is_fast:
        raise ModelLoadError(
            f"{folder}: the model has no tokenizer.json (a fast tokenizer), which is needed, and its own "
            "Python code only makes a slow one"
        )
    if not isinstance(tokenizer.model_max_length, int | float):
        text = f"expected a number, got {tokenizer.model_max_length!r}"
        raise ModelLoadError(f"{folder / 'tokenizer_config.json'}: model_max_length: {text}")
    _check_vocabulary(folder, tokenizer)
    if kind == "sentencepiece":
        compare_with_sentencepiece(folder / "tokenizer.model", tokenizer)
    return tokenizer


def find_vocabulary(folder: Path) -> VocabularyKind | None:
    """The kind of the model's vocabulary file, if a tokenizer can be made of it."""
    file = folder / "tokenizer.model"
    if (folder / "tiktoken.model").is_file() or any(folder.glob("*.tiktoken")):
        return "tiktoken"
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        line = opened.readline(4096).split()
    # A tiktoken file has lines of a token in base64 and its rank.
    return "tiktoken" if len(line) == 2 and line[1].isdigit() else "sentencepiece"


def _check_convertible(folder: Path, kind: VocabularyKind) -> None:
    """ModelLoadError if a package is missing, or if the file does not say how text is split."""
    if importlib.util.find_spec(kind) is None:
        raise ModelLoadError(
            f"{folder}: there is no tokenizer.json, and to make one of the {kind} file the package {kind} is "
            f"needed: pip install {_INSTALL[kind]}"
        )
    family = read_json(folder / "config.json").get("model_type")
    if kind == "tiktoken" and family not in _TIKTOKEN_FAMILIES:
        raise ModelLoadError(
            f"{folder}: there is no tokenizer.json, and a tiktoken file does not say how text is split, "
            f"which is only known for Llama 3 (model_type {family!r}): save the tokenizer with tokenizer.json"
        )


def _check_code(folder: Path) -> None:
    """ModelLoadError if the tokenizer is Python code in the model's folder, which is not run unasked."""
    config = read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file() or "AutoTokenizer" not in (config.get("auto_map") or {}):
        return
    raise ModelLoadError(
        f"{folder}: the tokenizer is Python code of the model (auto_map in tokenizer_config.json), which is "
        "not run because it could do anything on this machine: read it, and set model.trust_remote_code to "
        "run it"
    )


def compare_with_sentencepiece(file: Path, tokenizer: Any) -> None:
    """ModelLoadError unless the tokenizer splits text as sentencepiece does with its own file."""
    from sentencepiece import SentencePieceProcessor

    own = SentencePieceProcessor(model_file=str(file))
    for text in SAMPLES:
        if tokenizer.encode(text, add_special_tokens=False) != own.encode(text):
            raise ModelLoadError(
                f"{file}: the tokenizer that {type(tokenizer).__name__} of transformers makes of it splits "
                f"{text!r} otherwise than sentencepiece: name the right tokenizer_class in "
                "tokenizer_config.json, or save the tokenizer with tokenizer.json"
            )


def _explain_no_tokenizer(folder: Path, error: Exception) -> str:
    """Why there is no tokenizer: the library's own message may be a bare key, or name no file."""
    from huggingface_hub.errors import StrictDataclassError
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    others = [name for name in _OTHER_VOCABULARIES if any(folder.glob(name))]
    if not file.is_file() and others:
        return (
            f"{folder}: there is no tokenizer.json, and none can be made of {' and '.join(others)} with what "
            "tokenizer_config.json says: save the tokenizer with tokenizer.json, as "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER) of transformers does"
        )
    if not file.is_file() and not any(any(folder.glob(name)) for name in _ANY_TOKENIZER):
        return f"no tokenizer file in {folder} (tokenizer.json, tokenizer.model, ...)"
    last = str(error).strip().rpartition("\n")[2]  # the most helpful line of a list of attempts
    if not file.is_file():
        return f"{folder}: there is no tokenizer.json, and no other tokenizer can be loaded: {last}"
    try:
        Tokenizer.from_file(str(file))
    except Exception as found:  # the library raises bare exceptions
        return f"{file}: the file is damaged, or its kind of tokenizer is not known: {found}"
    if isinstance(error, StrictDataclassError):  # the library reads config.json for the tokenizer too
        return f"{folder / 'config.json'}: {last.strip()}"
    return f"{folder}: the tokenizer cannot be loaded: {type(error).__name__}: {error}"


def _check_vocabulary(folder: Path, tokenizer: Any) -> None:
    """ModelLoadError if text has no tokens: without a tokenizer.json the library may return an empty one."""
    backend = tokenizer.backend_tokenizer
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    ordinary = backend.get_vocab(with_added_tokens=False).keys() - added
    if ordinary and tokenizer.encode("a b", add_special_tokens=False):
        return
    what = "makes no tokens of text" if ordinary else "has no tokens but special ones"
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(_explain_no_tokenizer(folder, ValueError(f"it {what}")))
    raise ModelLoadError(f"{folder}: tokenizer.json is damaged: the tokenizer {what}")


def _check_templates(folder: Path) -> None:
    """ModelLoadError that names the template file which cannot be read; the library's error does not."""
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        try:
            path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path}: the chat template cannot be read: {error}") from error
