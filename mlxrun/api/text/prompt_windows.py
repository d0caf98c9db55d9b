"""Texts of any length in sliding windows, so that each of their tokens has a logprob.

The model sees a token with at most `size` tokens before it. Windows begin `stride` tokens after each other,
and a token counts in the first one that has it. So those that are not in the first window have more than
`size` - `stride` tokens before them. The last window is moved back, to be as long as the others. The first
one begins with the token that begins texts (bos, else eos). With a stride of `size`, these are the windows of
lm-evaluation-harness' `loglikelihood_rolling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.prompt import RenderedPrompt, check_text
from mlxrun.api.text.raw_prompts import MAX_CHOICES
from mlxrun.api.text.templates.template import get_image_markers
from mlxrun.api.text.tokens.tokens import tokenize
from mlxrun.core.field_errors import reject, reject_unsupported
from mlxrun.core.workers import run_on_text

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
