"""How an answer is drawn: the body's fields, the config, the model and built-in values, in this order.

Temperature is taken from 0 to 2, as OpenAI does, and below 0.00001 it is 0, as logits divided by less leave
float32; top_k 0 and -1 both mean all tokens. All ranges of a body were checked by schemas.py; here is what
needs the model.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from mlxrun.config.settings import Config
from mlxrun.errors import PromptTooLong
from mlxrun.scheduler.request import SamplingParams
from mlxrun.text.field_errors import bad, kind, need
from mlxrun.text.model_info import ModelInfo

MAX_STOPS = 16
MAX_STOP = 1024  # characters of one
_GREEDY = 1e-5
_ALL = 2**24  # more than any vocabulary, and exact in float32
_BUILT_IN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_MASK = 2**64 - 1


def sampling_params(
    body: Mapping[str, Any], host: ModelInfo, config: Config, logprobs: int | None
) -> SamplingParams:
    """Everything but `max_tokens` and `seed`, which depend on the prompt and the choice."""
    drawn = {name: _first(name, body, host, config) for name in _BUILT_IN}
    size = len(host.tokenizer)
    return SamplingParams(
        temperature=float(drawn["temperature"]) if drawn["temperature"] >= _GREEDY else 0.0,
        top_p=float(drawn["top_p"]),
        top_k=min(max(0, int(drawn["top_k"])), _ALL),
        min_p=float(drawn["min_p"]),
        repetition_penalty=float(drawn["repetition_penalty"]),
        presence_penalty=float(body.get("presence_penalty", 0.0)),
        frequency_penalty=float(body.get("frequency_penalty", 0.0)),
        logit_bias=_biases(body.get("logit_bias", {}), size),
        logprobs=logprobs,
        stop_ids=_stop_ids(body, host, size),
    )


def _first(name: str, body: Mapping[str, Any], host: ModelInfo, config: Config) -> float:
    configured = {
        "temperature": config.sampling.temperature,
        "top_p": config.sampling.top_p,
        "top_k": config.sampling.top_k,
        "min_p": config.sampling.min_p,
        "repetition_penalty": config.sampling.repetition_penalty,
    }
    candidates = (body.get(name), configured[name], host.defaults.get(name))
    return next((value for value in candidates if value is not None), _BUILT_IN[name])


def _biases(biases: Mapping[str, float], size: int) -> dict[int, float]:
    for key in biases:
        if str(int(key)) != key:
            raise bad(f"logit_bias.{key}", f"is not how a token id is written; write {str(int(key))!r}")
        if int(key) >= size:
            raise bad(f"logit_bias.{key}", f"is not a token id; the vocabulary has {size}")
    return {int(key): float(value) for key, value in biases.items()}


def _stop_ids(body: Mapping[str, Any], host: ModelInfo, size: int) -> frozenset[int]:
    asked = body.get("stop_token_ids", [])
    for i, token in enumerate(asked):
        if token >= size:
            raise bad(f"stop_token_ids[{i}]", f"{token} is not a token id; the vocabulary has {size}")
    eos = frozenset() if body.get("ignore_eos") else host.eos_ids
    return eos | frozenset(map(int, asked))


def chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """How many alternatives a token: `top_logprobs` says, `logprobs` switches."""
    if body.get("logprobs"):
        return int(body.get("top_logprobs", 0))
    if "top_logprobs" in body:
        raise bad("top_logprobs", 'needs "logprobs": true')
    return None


def stop_strings(value: Any) -> tuple[str, ...]:
    """`stop` as a tuple: one string or an array of them, none empty."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise bad("stop", f"expected a string or an array of strings, got {kind(value)}", code="invalid_type")
    if len(value) > MAX_STOPS:
        raise bad("stop", f"at most {MAX_STOPS} stop strings are taken, got {len(value)}")
    for i, stop in enumerate(value):
        if not need(stop, str, f"stop[{i}]"):
            raise bad(f"stop[{i}]", "is empty, which would stop every answer at once")
        if len(stop) > MAX_STOP:
            raise bad(f"stop[{i}]", f"has {len(stop)} characters; at most {MAX_STOP} are taken")
    return tuple(value)


def answer_length(
    body: Mapping[str, Any], prompt: int, host: ModelInfo, config: Config, default: int | None
) -> int:
    """Most tokens of the answer. What was asked for must fit; a default is cut to what is left."""
    asked = [name for name in ("max_completion_tokens", "max_tokens") if name in body]
    values = {int(body[name]) for name in asked}
    if len(values) > 1:
        raise bad("max_tokens", "differs from max_completion_tokens; give one of them")
    left = host.context_length - prompt
    wanted = values.pop() if values else None
    if left < (wanted or 1):
        answer = f"{wanted} tokens of answer" if wanted else "at least one token of answer"
        raise PromptTooLong(
            f"the prompt has {prompt} tokens; with {answer} that is more than the context "
            f"of {host.context_length} tokens",
            param=asked[0] if asked and left > 0 else None,
        )
    if wanted is None:
        wanted = config.sampling.max_tokens or default or left
    return min(wanted, left)


def choose_seed(body: Mapping[str, Any], config: Config, default: int | None) -> int:
    """The body's seed folded to 64 bits, else the config's, else the caller's, else a random one."""
    for seed in (body.get("seed"), config.sampling.seed, default):
        if seed is not None:
            return int(seed) & _MASK
    return secrets.randbits(53)  # 53: readers that know doubles only, such as JavaScript, give it back whole


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the first has the request's own, so that n=1 and n=3 begin alike
    (splitmix64)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
