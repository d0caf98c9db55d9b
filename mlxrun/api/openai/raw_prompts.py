"""The prompts of /v1/completions: texts, or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mlxrun.api.text.infill import build_infill_ids, find_infill_format
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.prompt import RenderedPrompt, build_raw_prompt, check_text
from mlxrun.api.text.templates.template import get_image_markers
from mlxrun.api.text.tokens.token_offsets import find_id_offsets, find_text_offsets
from mlxrun.api.text.tokens.tokens import check_length, count_shared_prefix
from mlxrun.core.field_errors import check_type, reject, reject_type, reject_unsupported
from mlxrun.core.workers import run_on_text

MAX_CHOICES = 2048  # of all prompts of a request


async def prepare_raw_prompts(
    prompt: Any, suffix: str, model_info: ModelInfo, *, offsets: bool = False
) -> list[RenderedPrompt]:
    """The prompts of a string, strings, token ids, or lists of token ids. With a suffix, the answer fills in
    the text between prompt and suffix; an empty one counts as none. `offsets`: find where tokens begin."""
    size = _count_characters(prompt) + len(suffix)
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
    """`prompts` with boundaries where each differs from its neighbours in the list, as the answers to one
    question do. They are before the token that predicts the first different one, which has its logprobs."""
    shared = [0, *(count_shared_prefix(a.ids, b.ids) - 1 for a, b in pairwise(prompts)), 0]
    return [
        replace(prompt, boundaries=tuple(sorted({at for at in around if at > 0})))
        for prompt, around in zip(prompts, pairwise(shared), strict=True)
    ]


def _count_characters(prompt: Any) -> int:
    """The characters of a string, or of all strings of a list."""
    parts = prompt if isinstance(prompt, list) else [prompt]
    return sum(len(part) for part in parts if isinstance(part, str))


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
