"""Tokenizes a text, and counts what can be known of its tokens without tokenizing all of it.

The first is the least number of tokens that a text can have. A token of a byte-level or byte-fallback BPE
covers at most as many bytes or characters of a text as its spelling has. So each byte or character accounts
for a share of a token: 1 / the length of the longest token with it. The sum of these shares is at most the
number of tokens. Bytes and characters that the vocabulary lacks may vanish, or become one token together, so
their share is 0. Unknown normalizers and pre-tokenizers may remove any text, so they give no bound.

The second is the number of tokens that two texts share. An added token splits a text into parts that are
normalized and tokenized separately. If two texts share a prefix, all before the last split in it has the same
tokens. Only the rest is tokenized again.
"""

from __future__ import annotations

import bisect
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.tokens.detokenize import make_byte_table
from mlxrun.api.text.tokens.tokenize_process import find_splits, find_splitting_tokens, tokenize_in_process
from mlxrun.core.errors import PromptTooLong
from mlxrun.core.workers import HUGE_TEXT, check_abandoned

# How many characters, or bytes, a normalizer can turn into one. A canonical decomposition has at most four
# characters, and NFC and NFD shorten none to less than a third in UTF-8 (Unicode Standard Annex 15).
_SHRINKING = {"NFC": 4, "NFD": 4, "Prepend": 1, "ByteLevel": 1}
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_SPLITTING_PRE_TOKENIZERS = ("Split", "Punctuation")  # these may remove what they split at
_UTF8_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]  # all that UTF-8 has
_BLOCK = 1 << 20  # units that are summed at once


@dataclass(frozen=True, slots=True, eq=False)
class TokenReach:
    """How much of a text one token may cover. `in_bytes`: units are bytes, else characters. `shares`: the
    share of a token for which each unit accounts at least. `normalized_share`: the same for units that a
    normalizer may merge; None: it merges none. `skips_spaces`: white space does not count, because an added
    token may swallow any amount of it."""

    shares: np.ndarray
    in_bytes: bool
    normalized_share: float | None
    skips_spaces: bool

    def count_least(self, text: str) -> int:
        """Return the least number of tokens of `text`."""
        if self.skips_spaces:
            text = "".join(text.split())
        total = 0.0
        for start in range(0, len(text), _BLOCK):
            total += self._sum_shares(text[start : start + _BLOCK])
        return int(total * (1 - 1e-6))  # rounded down by more than the sums are inexact

    def _sum_shares(self, text: str) -> float:
        raw = text.encode("utf-8" if self.in_bytes else "utf-32-le", "surrogatepass")
        units: Any = np.frombuffer(raw, np.uint8 if self.in_bytes else np.uint32)
        if self.normalized_share is None or text.isascii():
            return float(self.shares[units].sum())
        # ASCII merges only with marks that follow it; of other units nothing is known.
        is_ascii = units < 128
        stays = is_ascii & np.append(is_ascii[1:], False)
        merged = len(units) - int(stays.sum())
        return float(self.shares[units[stays]].sum()) + merged * self.normalized_share


def count_least_tokens(tokenizer: Any, text: str) -> int:
    """Return the least number of tokens of `text`; 0 if it is unknown. `tokenizer`: of transformers."""
    if not is_plain(tokenizer):
        return 0
    reach = find_reach(tokenizer.backend_tokenizer)
    return 0 if reach is None else reach.count_least(text)


def is_plain(tokenizer: Any) -> bool:
    """Tell whether the tokenizer passes texts to its backend unchanged."""
    from transformers import PreTrainedTokenizerFast

    names = ("__call__", "_encode_plus")
    return all(getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in names)


@functools.lru_cache(maxsize=8)
def find_reach(backend: Tokenizer) -> TokenReach | None:
    """Find out how much of a text a token of this tokenizer may cover; None if that is unknown."""
    shrinking = _find_shrinking(backend)
    if shrinking is None or not isinstance(backend.model, models.BPE) or not _keeps_all(backend):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    byte_levels = sum(part["type"] == "ByteLevel" for part in _list_all_parts(backend))
    if byte_levels > 1:  # the vocabulary spells the letters of bytes
        return None
    in_bytes = byte_levels == 1
    added = backend.get_added_tokens_decoder().values()
    spellings = [token.content for token in added]
    if backend.normalizer is not None:
        spellings += [backend.normalizer.normalize_str(text) for text in spellings]
    lengths = _measure_lengths(vocabulary, spellings, in_bytes)
    kept = find_kept(backend.model, vocabulary, in_bytes)
    shares, least = np.where(kept, 1.0 / lengths, 0.0).astype(np.float32), 1.0 / lengths.max() / shrinking
    replaced = [[_list_units(text, in_bytes) for text in pair] for pair in _list_replaced(backend)]
    keeps_replaced = all(kept[content].all() for _, content in replaced)
    for pattern, _ in replaced:  # several units may also come without one another, one alone may not
        shares[[u for u in pattern if kept[u] or len(pattern) == 1]] = least if keeps_replaced else 0.0
    return TokenReach(
        shares=shares,
        in_bytes=in_bytes,
        normalized_share=None if shrinking == 1 else least * kept[_UTF8_BYTES if in_bytes else ...].all(),
        skips_spaces=any(token.lstrip or token.rstrip for token in added),
    )


def find_kept(model: Any, vocabulary: dict[str, int], in_bytes: bool) -> np.ndarray:
    """For each byte or character, whether it always becomes a token, or a part of one."""
    prefix, suffix = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""

    def is_kept(char: str) -> bool:  # alone, and at the beginning, in the middle and at the end of a word
        forms = (char, prefix + char, char + suffix, prefix + char + suffix)
        return all(form in vocabulary for form in forms)

    if in_bytes:
        kept = np.zeros(256, np.bool_)
        kept[[byte for char, byte in make_byte_table().items() if is_kept(char)]] = True
        return kept
    has_byte = [model.byte_fallback and f"<0x{byte:02X}>" in vocabulary for byte in range(256)]
    kept = _find_spelled(np.array(has_byte))
    kept[[ord(char) for char in vocabulary if len(char) == 1 and is_kept(char)]] = True
    return kept


def _find_spelled(has_byte: np.ndarray) -> np.ndarray:
    """For each character, whether `has_byte` is true of all bytes of its UTF-8."""
    codes = np.arange(sys.maxunicode + 1)
    spelled: np.ndarray = has_byte[codes & 0x7F]
    tails = np.ones_like(spelled)
    for i, (first, mark) in enumerate(((0x80, 0xC0), (0x800, 0xE0), (0x10000, 0xF0)), 1):
        tails &= has_byte[0x80 | codes >> 6 * (i - 1) & 0x3F]
        spelled = np.where(codes < first, spelled, has_byte[mark | codes >> 6 * i & 0x3F] & tails)
    return spelled


def _list_units(text: str, in_bytes: bool) -> list[int]:
    return list(text.encode()) if in_bytes else list(map(ord, text))


def _measure_lengths(vocabulary: Iterable[str], spellings: Iterable[str], in_bytes: bool) -> np.ndarray:
    """For each byte or character, the length of the longest token with it; 1 if there is none. `spellings`:
    of added tokens, which a byte-level vocabulary does not write as bytes."""
    lengths = np.ones(256 if in_bytes else sys.maxunicode + 1, np.float32)
    byte_of = make_byte_table() if in_bytes else {}
    for token in vocabulary:
        for char in set(token):
            unit = byte_of.get(char) if in_bytes else ord(char)
            if unit is not None and lengths[unit] < len(token):
                lengths[unit] = len(token)
    for text in spellings:
        units = _list_units(text, in_bytes)
        lengths[units] = np.maximum(lengths[units], len(units))
    return lengths


def _find_shrinking(backend: Tokenizer) -> int | None:
    """The product of what all normalizers may turn into one; None: not known."""
    found = 1
    for part in _list_parts(backend.normalizer, "normalizers"):
        kind, pattern = part["type"], part.get("pattern", {}).get("String")
        if kind == "Replace" and pattern is not None:
            content = part["content"]
            if len(content) >= len(pattern) and len(content.encode()) >= len(pattern.encode()):
                continue
        if kind not in _SHRINKING:
            return None
        found *= _SHRINKING[kind]
    return found


def _keeps_all(backend: Tokenizer) -> bool:
    """Whether no pre-tokenizer removes text."""
    return all(
        part["type"] in _KEEPING_PRE_TOKENIZERS
        or (part["type"] in _SPLITTING_PRE_TOKENIZERS and part["behavior"] != "Removed")
        for part in _list_parts(backend.pre_tokenizer, "pretokenizers")
    )


def _list_replaced(backend: Tokenizer) -> Iterator[tuple[str, str]]:
    """Texts that are replaced by others, and these."""
    for part in _list_all_parts(backend):
        if part["type"] == "Replace":
            yield part["pattern"]["String"], part["content"]
        elif part["type"] == "Metaspace":
            yield " ", part["replacement"]


def _list_all_parts(backend: Tokenizer) -> list[dict[str, Any]]:
    normalizers = _list_parts(backend.normalizer, "normalizers")
    return [*normalizers, *_list_parts(backend.pre_tokenizer, "pretokenizers")]


def _list_parts(component: Any, sequence: str) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer as it is written in tokenizer.json, or those of a sequence."""
    if component is None:
        return
    stack = [json.loads(component.__getstate__())]
    while stack:
        part = stack.pop(0)
        if part["type"] == "Sequence":
            stack[:0] = part[sequence]
        else:
            yield part


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A text and its token ids. `splits`: from tokenize_process.find_splits; without them all is slower."""

    text: str
    ids: tuple[int, ...]
    splits: tuple[tuple[int, int], ...] = ()


def tokenize(model: ModelInfo, text: str, *, add_special_tokens: bool) -> PromptTokens:
    """Tokenize `text`. `add_special_tokens`: add those that the tokenizer puts around a text. Abandoned if
    nobody waits any more."""
    check_abandoned()
    tokenizer = model.tokenizer
    if len(text) > HUGE_TEXT and is_plain(tokenizer):
        return PromptTokens(
            text, *tokenize_in_process(tokenizer, text, add_special_tokens=add_special_tokens)
        )
    made = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    ids, encodings = tuple(made["input_ids"]), made.encodings
    splits = find_splits(tokenizer.backend_tokenizer, text, ids, encodings[0]) if encodings else ()
    return PromptTokens(text, ids, splits)


def check_length(model: ModelInfo, text: str, param: str | None = None) -> None:
    """Raise PromptTooLong if a text has certainly more tokens than the context, without tokenizing it."""
    if len(text) <= model.context_length:
        return
    least = count_least_tokens(model.tokenizer, text)
    if least >= model.context_length:
        raise PromptTooLong(
            f"the prompt has {least} tokens or more; with at least one token of answer that is more than "
            f"the context of {model.context_length} tokens",
            param=param,
        )


def count_shared_tokens(model: ModelInfo, tokens: PromptTokens, text: str) -> int:
    """Count the leading tokens that `tokens` and `text` share, both without special tokens around."""
    shared = count_shared_prefix(tokens.text, text)
    # The tokenizer takes the longest match, so all candidates for a split must lie within what is shared.
    last = shared - find_splitting_tokens(model.tokenizer.backend_tokenizer)[1]
    known = bisect.bisect_right(tokens.splits, last, key=lambda split: split[1])
    split, start = tokens.splits[known - 1] if known else (0, 0)
    rest = tokenize(model, text[start:], add_special_tokens=False)
    return split + count_shared_prefix(tokens.ids[split:], rest.ids)


def count_shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two strings or tuples."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
