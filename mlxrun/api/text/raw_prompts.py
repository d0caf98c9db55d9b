"""The prompts of /v1/completions: texts, token ids, texts around a gap that the model fills in, and windows.

A format for filling in is recognized by the three tokens that mark prefix, suffix and middle. A model whose
vocabulary lacks them was not trained for it. Sources: the model cards of the families, and the tokenizer of
CodeLlama (facebookresearch/codellama) for the suffix without an implicit space.

Texts of any length go in sliding windows, so that each of their tokens has a logprob. The model sees a token
with at most `size` tokens before it. Windows begin `stride` tokens after each other, and a token counts in
the first one that has it. So those that are not in the first window have more than `size` - `stride` tokens
before them. The last window is moved back, to be as long as the others. The first one begins with the token
that begins texts (bos, else eos). With a stride of `size`, these are the windows of lm-evaluation-harness'
`loglikelihood_rolling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.prompt import RenderedPrompt, build_raw_prompt, check_text
from mlxrun.api.text.templates.template import get_image_markers
from mlxrun.api.text.tokens.detokenize import find_id_offsets, find_text_offsets
from mlxrun.api.text.tokens.tokens import check_length, count_shared_prefix, tokenize
from mlxrun.core.field_errors import check_type, reject, reject_type, reject_unsupported
from mlxrun.core.workers import run_on_text

MAX_CHOICES = 2048  # of all prompts of a request


async def prepare_raw_prompts(
    prompt: Any, suffix: str, model_info: ModelInfo, *, offsets: bool = False
) -> list[RenderedPrompt]:
    """Build the prompts of a string, strings, token ids, or lists of token ids. RequestError if one is wrong.

    With a `suffix`, the answer fills the gap between prompt and suffix. `offsets`: find where tokens
    begin."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    size = sum(len(each) for each in (*texts, suffix) if isinstance(each, str))
    prompts = await run_on_text(size, _build_raw_prompts, prompt, suffix, model_info)
    if not offsets:
        return prompts
    return await run_on_text(size, _add_offsets, prompts, prompt, model_info)


def _add_offsets(prompts: list[RenderedPrompt], prompt: Any, model_info: ModelInfo) -> list[RenderedPrompt]:
    """`prompts`, made of `prompt`, with the offsets of their tokens."""
    given = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
    find = (find_id_offsets, find_text_offsets)
    return [
        replace(made, offsets=find[isinstance(each, str)](model_info, made.text, made.ids))
        for made, each in zip(prompts, given, strict=True)
    ]


def mark_branches(prompts: Sequence[RenderedPrompt]) -> list[RenderedPrompt]:
    """Return `prompts` with cache positions where each begins to differ from its neighbours in the list.

    A position is one token earlier: that token predicts the first different one, and gives its logprobs."""
    shared = [0, *(count_shared_prefix(a.ids, b.ids) - 1 for a, b in pairwise(prompts)), 0]
    return [
        replace(prompt, cache_positions=tuple(sorted({at for at in around if at > 0})))
        for prompt, around in zip(prompts, pairwise(shared), strict=True)
    ]


def _build_raw_prompts(prompt: Any, suffix: str, model_info: ModelInfo) -> list[RenderedPrompt]:
    if isinstance(prompt, list) and not prompt:
        reject("prompt", "is empty; give at least one prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and type(prompt[0]) is int):
        prompts = [("prompt", prompt)]
    elif isinstance(prompt, list):
        if len(prompt) > MAX_CHOICES:
            reject("prompt", f"has {len(prompt)} prompts; at most {MAX_CHOICES} are allowed")
        expected = str if isinstance(prompt[0], str) else list
        prompts = [(f"prompt[{i}]", each) for i, each in enumerate(prompt)]
        for param, each in prompts:
            check_type(each, expected, param)
    else:
        reject_type("prompt", prompt, "a string or an array")
    for param, each in prompts:
        if isinstance(each, list) and set(map(type, each)) != {int}:
            for i, token in enumerate(each):
                check_type(token, int, f"{param}[{i}]")
    if suffix:
        return [_build_infill_prompt(model_info, each, param, suffix) for param, each in prompts]
    return [build_raw_prompt(model_info, each, param) for param, each in prompts]


def _build_infill_prompt(
    model_info: ModelInfo, prompt: str | list[int], param: str, suffix: str
) -> RenderedPrompt:
    found = find_infill_format(model_info)
    if found is None:
        reason = f"the vocabulary of {model_info.name!r} has no tokens for filling in text; leave it out"
        reject_unsupported("suffix", reason)
    if not isinstance(prompt, str):
        reject("suffix", "goes with a prompt that is text")
    for name, text in ((param, prompt), ("suffix", suffix)):
        check_text(text, name, get_image_markers(model_info))
        check_length(model_info, text, name)
    return RenderedPrompt(prompt, build_infill_ids(model_info, found, prompt, suffix))


_ANCHOR = "\u263a"  # a character that no text begins with, so that a suffix is not at the start of a text


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens that mark the parts. They end an answer; `ends`: other tokens that do."""

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
    """Find the format whose marks the model's vocabulary has."""
    find = model.tokenizer.backend_tokenizer.token_to_id
    return next((each for each in FORMATS.values() if None not in map(find, each.marks)), None)


def find_infill_end_ids(model: ModelInfo) -> frozenset[int]:
    """Find the tokens that end an answer which fills a gap, besides the model's own."""
    found = find_infill_format(model)
    return frozenset() if found is None else frozenset(_find_ids(model, (*found.marks, *found.ends)))


def build_infill_ids(model: ModelInfo, found: InfillFormat, prefix: str, suffix: str) -> tuple[int, ...]:
    """Build the token ids of a prompt that asks for the text between `prefix` and `suffix`."""
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


WINDOWS = "prompt_windows"
_NEEDED = {"echo": True, "logprobs": 0, "max_tokens": 0}
_NOT_BESIDE = ("suffix", "stream", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")


def check_prompt_windows(given: Mapping[str, Any]) -> None:
    """Raise RequestError if a body with `prompt_windows` has other fields than fit it."""
    if not isinstance(given.get("prompt"), str) or not given["prompt"]:
        reject("prompt", f"must be one text that is not empty, because {WINDOWS} is given")
    if any(given.get(name) != value for name, value in _NEEDED.items()):
        reject(WINDOWS, "needs `echo: true, logprobs: 0, max_tokens: 0`: the logprobs of the prompt alone")
    beside = [name for name in _NOT_BESIDE if given.get(name)] + (["n"] if given.get("n", 1) != 1 else [])
    for name in beside:
        reject_unsupported(name, f"not together with {WINDOWS}")


async def prepare_windows(given: Mapping[str, Any], model_info: ModelInfo) -> list[RenderedPrompt]:
    """Make the prompt of each window of a checked body. RequestError if they do not fit into the context."""
    text, wanted = given["prompt"], given[WINDOWS]
    most = model_info.context_length - 1  # a token before them begins the text
    size = wanted.get("size", most)
    stride = wanted.get("stride", size)
    if size > most:
        reject(f"{WINDOWS}.size", f"is {size}, and the model has a context of {most + 1} tokens")
    if stride > size:
        reject(
            f"{WINDOWS}.stride",
            f"is {stride}, more than the size of a window ({size}): tokens would be left out",
        )
    return await run_on_text(len(text), _build_windows, text, size, stride, model_info)


def _build_windows(text: str, size: int, stride: int, model_info: ModelInfo) -> list[RenderedPrompt]:
    check_text(text, "prompt", get_image_markers(model_info))
    tokenizer = model_info.tokenizer
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        reject_unsupported(WINDOWS, f"the tokenizer of {model_info.name!r} has no token that begins a text")
    ids = tokenize(model_info, text, add_special_tokens=False).ids
    if not ids:
        reject("prompt", "has no tokens")
    count = 1 + -(-max(0, len(ids) - size) // stride)
    if count > MAX_CHOICES:
        reject(WINDOWS, f"the text has {count} windows; at most {MAX_CHOICES} are allowed")
    return [
        RenderedPrompt("", window, logprobs_from=start)
        for window, start in split_windows((first, *ids), size, stride)
    ]


def split_windows(ids: Sequence[int], size: int, stride: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the windows of a text, each with the position of its first token that no window before has.
    `ids`: the token that begins texts, and those of the text."""
    end = 1
    while end < len(ids):
        new = min(len(ids) - end, stride if end > 1 else size)
        end += new
        window = tuple(ids[max(0, end - size - 1) : end])
        yield window, len(window) - new
