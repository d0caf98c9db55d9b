"""Prompts that have a model fill in the text between a prefix and a suffix.

A format is recognized by the three tokens that mark prefix, suffix and middle; a model whose vocabulary has
none of them was not trained for it. Sources: the model cards of the families, and the tokenizer of CodeLlama
(facebookresearch/codellama) for the suffix without an implicit space.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.tokens.tokens import tokenize

_ANCHOR = "\u263a"  # a character that no text begins with, so that a suffix is not at the start of a text


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens that mark the parts. `ends`: others that end an answer; the marks themselves do, too."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    suffix_first: bool = False
    has_implicit_space: bool = False  # the tokenizer puts a space in front of a text

    @property
    def marks(self) -> tuple[str, str, str]:
        return self.prefix, self.suffix, self.middle


FORMATS = {
    "qwen2.5-coder, qwen3-coder, codegemma, granite 4": InfillFormat(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    "starcoder, granite-code, stable-code, smollm": InfillFormat(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ends=("<fim_pad>", "<file_sep>", "<repo_name>", "<filename>", "<reponame>", "<|endoftext|>"),
    ),
    "santacoder": InfillFormat(
        *("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ends=("<fim-pad>", "<|endoftext|>")
    ),
    "deepseek-coder": InfillFormat(
        *("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>")
    ),
    "codellama": InfillFormat(
        *("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), ends=("\u2581<EOT>",), has_implicit_space=True
    ),
    "seed-coder": InfillFormat(
        *("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), ends=("<filename>",), suffix_first=True
    ),
}


def find_infill_format(model: ModelInfo) -> InfillFormat | None:
    """The format whose marks the model's vocabulary has."""
    find = model.tokenizer.backend_tokenizer.token_to_id
    return next((each for each in FORMATS.values() if None not in map(find, each.marks)), None)


def find_infill_end_ids(model: ModelInfo) -> frozenset[int]:
    """The tokens that end an answer which fills in a text, besides the model's own."""
    found = find_infill_format(model)
    return frozenset() if found is None else frozenset(_find_ids(model, (*found.marks, *found.ends)))


def build_infill_ids(model: ModelInfo, found: InfillFormat, prefix: str, suffix: str) -> tuple[int, ...]:
    """The token ids of a prompt after which the model writes what is between `prefix` and `suffix`."""
    begin, hole, middle = _find_ids(model, found.marks)
    first = (begin, *tokenize(model, prefix, add_special_tokens=False).ids)
    second = (hole, *_tokenize_suffix(model, found, suffix))
    parts = (*second, *first) if found.suffix_first else (*first, *second)
    return (*_find_start_ids(model), *parts, middle)


def _tokenize_suffix(model: ModelInfo, found: InfillFormat, suffix: str) -> tuple[int, ...]:
    if found.has_implicit_space:
        anchor = tokenize(model, _ANCHOR, add_special_tokens=False).ids
        ids = tokenize(model, _ANCHOR + suffix, add_special_tokens=False).ids
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
    return tokenize(model, suffix, add_special_tokens=False).ids


def _find_start_ids(model: ModelInfo) -> tuple[int, ...]:
    """The token that the tokenizer puts in front of a text, if any."""
    begin = model.tokenizer.bos_token_id
    around = tokenize(model, "", add_special_tokens=True).ids
    starts = around and (around[0] == begin or (begin is None and around[0] not in model.eos_ids))
    return around[:1] if starts else ()


def _find_ids(model: ModelInfo, tokens: Iterable[str]) -> list[int]:
    """The ids of those tokens that the vocabulary has."""
    find = model.tokenizer.backend_tokenizer.token_to_id
    return [token for token in map(find, tokens) if token is not None]
