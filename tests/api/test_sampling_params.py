"""Sampling parameters, seeds and lengths come from the body, the config and the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mlxrun.api.openai.response import build_response
from mlxrun.api.sampling_params import DEFAULT_MAX_TOKENS, derive_choice_seed
from mlxrun.config.settings import (
    Config,
    SamplingSettings,
)
from mlxrun.core.errors import PromptTooLong
from tests.helpers.openai_api import CHAT, COMPLETION, HI, MODEL_INFO, answer, chat, complete, make, refused
from tests.helpers.tokenizers import (
    FakeModelInfo,
)


def test_defaults_go_from_body_to_config_to_model() -> None:
    """Each value from the first that has one."""
    model_info = FakeModelInfo(defaults={"temperature": 0.3, "top_k": 20.0, "top_p": 0.9})
    config = Config(sampling=SamplingSettings(temperature=0.5, min_p=0.1))
    params = chat(model_info, config, top_p=0.5).requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.5, 20, 0.1)
    assert params.repetition_penalty == 1.0
    assert chat(model_info, config, temperature=0).requests[0].params.temperature == 0.0
    built_in = chat().requests[0].params
    assert (built_in.temperature, built_in.top_p, built_in.top_k, built_in.min_p) == (1.0, 1.0, 0, 0.0)


def test_every_sampling_field_arrives() -> None:
    """Per request, none dropped."""
    params = (
        chat(
            temperature=0.25,
            top_p=0.5,
            top_k=7,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={"5": -100, "6": 1.5},
            seed=11,
            max_completion_tokens=9,
            logprobs=True,
            top_logprobs=3,
            stop_token_ids=[65],
            min_tokens=4,
            prompt_logprobs=2,
        )
        .requests[0]
        .params
    )
    assert dataclasses.asdict(params) == {
        "max_tokens": 9,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {5: -100.0, 6: 1.5},
        "seed": 11,
        "logprobs": 3,
        "stop_ids": MODEL_INFO.eos_ids | {65},
        "min_tokens": 4,
        "end_ids": MODEL_INFO.eos_ids | {65},
        "prompt_logprobs": 2,
    }
    assert chat(top_k=-1, ignore_eos=True).requests[0].params.stop_ids == frozenset()
    assert complete(logprobs=0).requests[0].params.logprobs == 0


def test_settings_that_leave_float32() -> None:
    """A temperature that would make infinities is greedy; a top_k beyond any vocabulary is all of it."""
    params = [chat(temperature=t).requests[0].params.temperature for t in (1e-300, 9.9e-6, 1e-5, 0.5)]
    assert params == [0.0, 0.0, 1e-5, 0.5]
    assert [chat(top_k=k).requests[0].params.top_k for k in (2**70, 1e30, 7)] == [2**24, 2**24, 7]
    config = Config(sampling=SamplingSettings(temperature=1e-40, top_k=2**40))
    configured = chat(config=config).requests[0].params
    assert (configured.temperature, configured.top_k) == (0.0, 2**24)


def test_seeds() -> None:
    """The same seed is the same answer, no seed is a new one, and it is reported."""
    assert chat(seed=5).seed == 5
    assert chat(seed=-1).requests[0].params.seed == 2**64 - 1
    assert chat(config=Config(sampling=SamplingSettings(seed=3))).seed == 3
    seeds = {chat().seed for _ in range(20)}
    assert len(seeds) == 20 and max(seeds) < 2**53 and max(seeds) > 2**47  # whole in JavaScript
    three = chat(seed=5, n=3)
    seeds = [request.params.seed for request in three.requests]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert seeds == [derive_choice_seed(5, i) for i in range(3)]
    assert [r.params.seed for r in complete(prompt=["a", "b"], seed=5).requests] == [5, 5]
    assert build_response(three, answer(three, "a", "b", "c"), "x", 0)["mlxrun"] == {"seed": 5}


def test_length_of_the_answer() -> None:
    """What was asked for must fit, with the numbers said; a default is cut to what is left."""
    model_info = FakeModelInfo(context_length=50)
    prompt = len(chat(model_info).requests[0].prompt)
    left = 50 - prompt
    assert chat(model_info).requests[0].params.max_tokens == left
    assert chat(model_info, max_tokens=left).requests[0].params.max_tokens == left
    assert make(CHAT, {"messages": HI}, model_info, default_max_tokens=4).requests[0].params.max_tokens == 4
    assert (
        make(CHAT, {"messages": HI}, model_info, default_max_tokens=400).requests[0].params.max_tokens == left
    )
    limited = Config(sampling=SamplingSettings(max_tokens=6))
    assert (
        make(CHAT, {"messages": HI}, model_info, limited, default_max_tokens=4).requests[0].params.max_tokens
        == 6
    )
    error = refused(CHAT, {"messages": HI, "max_tokens": left + 1}, model_info)
    assert isinstance(error, PromptTooLong) and error.param == "max_tokens"
    assert f"{prompt} tokens" in str(error) and f"{left + 1} tokens" in str(error) and "50" in str(error)
    error = refused(COMPLETION, {"prompt": "x" * 60}, model_info)
    assert isinstance(error, PromptTooLong) and error.code == "context_length_exceeded"
    assert chat(max_tokens=5, max_completion_tokens=5).requests[0].params.max_tokens == 5
    config = Config(sampling=SamplingSettings(max_tokens=6))
    full = complete(model_info, config, prompt=[1] * 50, max_tokens=0).requests[0]
    assert (full.params.max_tokens, len(full.prompt)) == (0, 50)
    assert isinstance(refused(COMPLETION, {"prompt": [1] * 50}, model_info), PromptTooLong)
    assert isinstance(refused(COMPLETION, {"prompt": [1] * 51, "max_tokens": 0}, model_info), PromptTooLong)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"echo": False, "logprobs": 3}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3}, 3),
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 3}, 3),
        ({"prompt_logprobs": 5, "echo": True, "logprobs": 3}, 5),
    ],
)
def test_which_requests_want_logprobs_of_their_prompt(fields: dict[str, Any], wanted: int | None) -> None:
    params = complete(**fields).requests[0].params
    assert (params.prompt_logprobs, params.logprobs) == (wanted, fields.get("logprobs"))


def test_min_tokens_hold_back_every_end() -> None:
    """Also the model's own ends where they do not end the answer; without a minimum nothing is held back."""
    params = chat(min_tokens=3, ignore_eos=True, stop_token_ids=[65]).requests[0].params
    assert (params.stop_ids, params.end_ids) == ({65}, MODEL_INFO.eos_ids | {65})
    for fields in ({}, {"min_tokens": 0}):
        params = chat(**fields).requests[0].params
        assert (params.min_tokens, params.end_ids) == (0, frozenset())


def test_more_tokens_than_an_answer_may_have_are_refused() -> None:
    config = Config(sampling=SamplingSettings(max_tokens=7))
    cases: list[tuple[dict[str, int], Config]] = [({"max_tokens": 5}, Config()), ({}, config), ({}, Config())]
    for fields, each in cases:
        least = fields.get("max_tokens", each.sampling.max_tokens or 10**6) + 1
        error = refused(CHAT, {"messages": HI, **fields, "min_tokens": least}, config=each)
        assert (error.param, error.http_status) == ("min_tokens", 400)
    assert chat(max_tokens=5, min_tokens=5).requests[0].params.min_tokens == 5
    assert refused(COMPLETION, {"prompt": "a", "min_tokens": -1}).param == "min_tokens"


def test_an_answer_without_a_limit_has_a_default_one() -> None:
    """Whatever the context; the config and the caller may set another, and the context is the most."""
    large = FakeModelInfo(context_length=10**6)
    assert chat(large).requests[0].params.max_tokens == DEFAULT_MAX_TOKENS
    assert (
        chat(large, Config(sampling=SamplingSettings(max_tokens=10**5))).requests[0].params.max_tokens
        == 10**5
    )
    assert make(CHAT, {"messages": HI}, large, default_max_tokens=9).requests[0].params.max_tokens == 9
    assert chat(large, max_tokens=5 * 10**5).requests[0].params.max_tokens == 5 * 10**5
    small = chat().requests[0]
    assert small.params.max_tokens == MODEL_INFO.context_length - len(small.prompt)
