"""Reads sampling parameters: each from the body, else the config, else the model, else a built-in default.

Temperatures below 0.00001 count as 0, because logits divided by less overflow float32. `top_k` 0 and -1 mean
all tokens. body_schema.py has checked the ranges. Limits that depend on the model are checked here, and give
a RequestError.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.raw_prompts import find_infill_end_ids
from mlxrun.config.settings import Config
from mlxrun.core.errors import PromptTooLong
from mlxrun.core.field_errors import check_type, reject, reject_type
from mlxrun.core.request import SamplingParams

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters of one
DEFAULT_MAX_TOKENS = 32_768  # of an answer, where neither the body, nor the config, nor the caller sets it
_GREEDY = 1e-5
_MAX_TOP_K = 2**24  # more than any vocabulary, and exact in float32
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_MASK = 2**64 - 1


def build_sampling_params(
    body: Mapping[str, Any], model_info: ModelInfo, config: Config, logprobs: int | None
) -> SamplingParams:
    """Return all parameters but `max_tokens` and `seed`, which depend on the prompt and the choice."""
    values = {}
    for name, default in _DEFAULTS.items():
        candidates = (body.get(name), getattr(config.sampling, name), model_info.defaults.get(name))
        values[name] = next((value for value in candidates if value is not None), default)
    size = len(model_info.tokenizer)
    stop_ids, min_tokens = _read_stop_ids(body, model_info, size), int(body.get("min_tokens", 0))
    return SamplingParams(
        temperature=float(values["temperature"]) if values["temperature"] >= _GREEDY else 0.0,
        top_p=float(values["top_p"]),
        top_k=min(max(0, int(values["top_k"])), _MAX_TOP_K),
        min_p=float(values["min_p"]),
        repetition_penalty=float(values["repetition_penalty"]),
        presence_penalty=float(body.get("presence_penalty", 0.0)),
        frequency_penalty=float(body.get("frequency_penalty", 0.0)),
        logit_bias=_read_logit_bias(body.get("logit_bias", {}), size),
        logprobs=logprobs,
        prompt_logprobs=read_prompt_logprobs(body),
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        end_ids=stop_ids | model_info.eos_ids if min_tokens else frozenset(),
    )


def _read_logit_bias(biases: Mapping[str, float], size: int) -> dict[int, float]:
    for key in biases:
        if str(int(key)) != key:
            reject(f"logit_bias.{key}", f"is not a normalized token id; write {str(int(key))!r}")
        if int(key) >= size:
            reject(f"logit_bias.{key}", f"is not a token id; the vocabulary has {size} tokens")
    return {int(key): float(value) for key, value in biases.items()}


def _read_stop_ids(body: Mapping[str, Any], model_info: ModelInfo, size: int) -> frozenset[int]:
    given = body.get("stop_token_ids", [])
    for i, token in enumerate(given):
        if token >= size:
            reject(f"stop_token_ids[{i}]", f"{token} is not a token id; the vocabulary has {size} tokens")
    eos = frozenset() if body.get("ignore_eos") else model_info.eos_ids
    if body.get("suffix") and not body.get("ignore_eos"):
        eos |= find_infill_end_ids(model_info)
    return eos | frozenset(map(int, given))


def read_chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return the number of alternatives per token, `top_logprobs`; None: no logprobs."""
    if body.get("logprobs"):
        return int(body.get("top_logprobs", 0))
    if body.get("top_logprobs"):
        reject("top_logprobs", 'needs "logprobs": true')
    return None


def read_prompt_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return the number of alternatives per prompt token; None: no logprobs of prompts. Both vLLM's
    `prompt_logprobs` and OpenAI's `echo` with `logprobs` ask for them; the larger number counts."""
    echoed = body.get("logprobs") if body.get("echo") else None
    counts = [int(count) for count in (body.get("prompt_logprobs"), echoed) if count is not None]
    return max(counts, default=None)


def read_stop_strings(value: Any) -> tuple[str, ...]:
    """Return `stop`, a string or an array of strings, as a tuple. None of them may be empty."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        reject_type("stop", value, "a string or an array of strings")
    if len(value) > MAX_STOPS:
        reject("stop", f"at most {MAX_STOPS} stop strings are allowed, got {len(value)}")
    for i, stop in enumerate(value):
        if not check_type(stop, str, f"stop[{i}]"):
            reject(f"stop[{i}]", "is empty, which would stop every answer at once")
        if len(stop) > MAX_STOP_LENGTH:
            reject(f"stop[{i}]", f"has {len(stop)} characters; at most {MAX_STOP_LENGTH} are allowed")
    return tuple(value)


def compute_max_tokens(
    body: Mapping[str, Any], prompt: int, model_info: ModelInfo, config: Config, default: int | None
) -> int:
    """Return the maximum number of answer tokens. `prompt`: the number of the prompt's tokens.

    A requested number may be 0. PromptTooLong if it does not fit into the context; a default is lowered to
    what fits. RequestError if `min_tokens` is more."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in body]
    values = {int(body[name]) for name in names}
    if len(values) > 1:
        reject("max_tokens", "differs from max_completion_tokens; give one of them")
    left = model_info.context_length - prompt
    requested = values.pop() if values else None
    if left < (1 if requested is None else requested):
        answer = "at least one token of answer" if requested is None else f"{requested} tokens of answer"
        raise PromptTooLong(
            f"the prompt has {prompt} tokens; with {answer} that is more than the context "
            f"of {model_info.context_length} tokens",
            param=names[0] if names and left > 0 else None,
        )
    usual = config.sampling.max_tokens or default or DEFAULT_MAX_TOKENS
    most = min(usual if requested is None else requested, left)
    if int(body.get("min_tokens", 0)) > most:
        reject("min_tokens", f"is more than the answer may have: {most} tokens (max_tokens, and the context)")
    return most


def choose_seed(body: Mapping[str, Any], config: Config) -> int:
    """Return the body's seed, else the config's, folded to 64 bits; else a random one."""
    for seed in (body.get("seed"), config.sampling.seed):
        if seed is not None:
            return int(seed) & _MASK
    return secrets.randbits(53)  # exact as a double, so that JavaScript clients can send it back


def derive_choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`, by splitmix64. The first choice has the request's own seed."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
