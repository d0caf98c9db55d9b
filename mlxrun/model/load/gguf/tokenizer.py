"""Makes the tokenizer that the metadata of a GGUF file describes."""

from __future__ import annotations

from typing import Any

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.gguf.header import GgufHeader

_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens that are never split
# Llama 3's way, and Tekken's: a word that is a token stays one, whether or not merges lead to it, and text
# begins with the begin token if the file does not say otherwise.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
_LONGEST = 1 << 10  # characters of a token: the time of making merges grows with their square
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def make_tokenizer(header: GgufHeader) -> Any:
    """A fast tokenizer of transformers, with its special tokens and its chat template. ModelLoadError for an
    unknown kind of tokenizer."""
    from transformers import PreTrainedTokenizerFast

    kind = header.read("tokenizer.ggml.model", str)
    tokens = _read_strings(header, "tokenizer.ggml.tokens")
    if not tokens or kind not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"{header.path}: tokenizer.ggml.model is {kind!r:.60}; GGUF files with the tokens of a "
            "byte-level BPE (gpt2) or of sentencepiece (llama) can be read"
        )
    backend = _make_byte_level(header, tokens) if kind == "gpt2" else _make_sentencepiece(header, tokens)
    _add_special_tokens(header, tokens, backend)
    named = {name: _find_token(header, tokens, key) for name, key in _NAMES.items()}
    _add_bos(header, backend, named["bos_token"], kind)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.read("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )


def _read_strings(header: GgufHeader, key: str) -> list[str]:
    found: list[Any] = header.read(key, list, [])
    wrong = next((each for each in found if not isinstance(each, str)), None)
    if wrong is not None:
        raise ModelLoadError(f"{header.path}: {key} has {wrong!r:.60}, which is not a str")
    return found


def _find_token(header: GgufHeader, tokens: list[str], key: str) -> str | None:
    number = header.read(f"tokenizer.ggml.{key}", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise ModelLoadError(f"{header.path}: tokenizer.ggml.{key} is {number}, of {len(tokens)} tokens")
    return tokens[number]


def _make_byte_level(header: GgufHeader, tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models

    merges = [_read_merge(header, each) for each in _read_strings(header, "tokenizer.ggml.merges")]
    whole = header.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    try:
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole))
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"{header.path}: the tokens and merges do not fit: {error}") from error
    backend.pre_tokenizer = _make_splitter(header)
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_merge(header: GgufHeader, merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    if not first or not second or " " in second:
        raise ModelLoadError(f"{header.path}: tokenizer.ggml.merges has {merge!r:.60}, which is not a pair")
    return first, second


def _make_splitter(header: GgufHeader) -> Any:
    """How text is split before merges apply, by the name in the file."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = header.read("tokenizer.ggml.pre", str)
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelLoadError(
            f"{header.path}: tokenizer.ggml.pre is {name!r:.60}, a way to split text that is not known"
        )
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _make_sentencepiece(header: GgufHeader, tokens: list[str]) -> Any:
    """A sentencepiece BPE as merges, which are those of the tokens in the order of their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    scores = header.read("tokenizer.ggml.scores", list, [])
    longest = max(map(len, tokens))
    if longest > _LONGEST:
        raise ModelLoadError(f"{header.path}: a token has {longest:,} characters, {_LONGEST:,} are the most")
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{header.path}: {len(scores)} scores of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    unknown = _find_token(header, tokens, "unknown_token_id")
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = header.read("tokenizer.ggml.add_space_prefix", bool, True)
    begin = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend


def _add_special_tokens(header: GgufHeader, tokens: list[str], backend: Any) -> None:
    from tokenizers import AddedToken

    kinds = header.read("tokenizer.ggml.token_type", list, [])
    found = list(zip(tokens, kinds, strict=False))
    # Each call looks at all tokens that were added before.
    backend.add_special_tokens(
        [AddedToken(each, normalized=False, special=True) for each, kind in found if kind == _CONTROL]
    )
    backend.add_tokens([AddedToken(each, normalized=False) for each, kind in found if kind == _USER_DEFINED])


def _add_bos(header: GgufHeader, backend: Any, bos: str | None, kind: str) -> None:
    """Begin each text with the begin token where the file says so, as llama.cpp does."""
    from tokenizers import processors

    default = kind == "llama" or header.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    if bos is None or not header.read("tokenizer.ggml.add_bos_token", bool, default):
        return
    number = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=number
    )
