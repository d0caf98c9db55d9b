"""A choice collects token events, however they are merged, and resumes at any token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.choice import Choice, parse_arguments
from mlxrun.api.openai.response import build_response
from mlxrun.api.prepared import PreparedRequest
from mlxrun.core.errors import EngineDead
from mlxrun.core.request import FinishReason, HitKind, TokenEvent, TokenLogprob
from tests.helpers.openai_api import CHAT, COMPLETION, HI, MODEL_INFO, answer, chat, complete, join, make
from tests.helpers.tokenizers import (
    FakeModelInfo,
    ids_of,
    metaspace_tokenizer,
)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abE\u0159\u4f60\U0001f600", max_size=12), st.lists(st.integers(0, 40), max_size=4))
def test_events_may_be_merged_in_any_way(text: str, cuts: list[int]) -> None:
    """What is streamed joins to the whole text, and all counts are the same, however events arrive."""
    prepared = complete(logprobs=0, stop=["bE", "\u0159a"])
    ids = ids_of(text)
    lps = tuple(TokenLogprob(-1.0) for _ in ids)

    def run(bounds: list[int]) -> tuple[Any, ...]:
        choice = Choice(prepared, 0, MODEL_INFO)
        shown = ""
        for start, end in zip(bounds, bounds[1:], strict=False):
            last = FinishReason.LENGTH if end == bounds[-1] and start == bounds[-2] else None
            shown += join(choice.feed(TokenEvent("r", ids[start:end], lps[start:end], finish=last)))
        assert shown == choice.text
        return (
            choice.text,
            choice.stop,
            choice.finish_reason,
            choice.completion_tokens,
            choice.get_tokens_with_logprobs(),
        )

    one_by_one = run([*range(len(ids) + 1), len(ids)])
    assert run([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids), len(ids)]) == one_by_one
    assert run([0, len(ids)]) == one_by_one


RESUMED = (
    "a\u4f60bE",
    "\U0001f600\u0159a!",
    "b\u0159",
    "ok<|im_end|>more",
    "\u4f60\u4f60",
    "plain bbE text",
)


@pytest.mark.parametrize("text", RESUMED)
@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_an_answer_resumes_at_any_token(url: str, text: str) -> None:
    """Known tokens and then events give what events alone give: text, stop, counts, logprobs; also
    where a stop string or a character lies across the border, and cut within the last character."""
    wanted = {"logprobs": True, "top_logprobs": 1} if url == CHAT else {"logprobs": 1}
    of = {"messages": HI} if url == CHAT else {"prompt": "hi"}
    prepared = make(url, {**of, **wanted, "stop": ["bE", "\u0159a"], "seed": 1})
    for ids in (tuple(text.encode()), ids_of(text), tuple(text.encode())[:-1]):
        logprobs = tuple(TokenLogprob(-0.1 * i, ((t, -0.1 * i),)) for i, t in enumerate(ids))
        whole = resumed(prepared, ids, logprobs, 0)
        for k in range(1, len(ids) + 1):
            assert resumed(prepared, ids, logprobs, k) == whole


def resumed(
    prepared: PreparedRequest, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], k: int
) -> tuple[Any, ...]:
    """Everything that shows of an answer whose first `k` tokens are known."""
    choice = Choice(prepared, 0, MODEL_INFO)
    shown = join(choice.resume(ids[:k], logprobs[:k])) if k else ""
    assert shown == choice.text
    for token, logprob in zip(ids[k:], logprobs[k:], strict=True):
        event = TokenEvent(
            "r", (token,), (logprob,), num_computed_tokens=9, num_cached_tokens=4, hit_kind=HitKind.LCP
        )
        shown += join(choice.feed(event))
    last = TokenEvent(
        "r", num_computed_tokens=9, num_cached_tokens=4, hit_kind=HitKind.LCP, finish=FinishReason.LENGTH
    )
    shown += join(choice.feed(last))
    assert shown == choice.text
    body = build_response(prepared, [choice], "x", 0)
    return (
        body,
        choice.stop,
        choice.stopped,
        choice.get_tokens_with_logprobs(),
        choice.cached_tokens,
        choice.hit,
    )


def test_an_answer_that_was_complete_stays_complete() -> None:
    """A stop string among the known tokens: nothing is wanted of the engine."""
    choice = Choice(complete(stop="END"), 0, MODEL_INFO)
    assert join(choice.resume(ids_of("abEND"))) == "ab"
    assert (choice.stopped, choice.stop, choice.finish_reason) == (True, "END", "stop")
    assert Choice(complete(), 0, MODEL_INFO).resume(()) == []


def test_stop_strings_in_the_first_tokens_do_not_count() -> None:
    """Neither as events, merged or not, nor as known tokens; the first one behind them does."""
    for fields in ({"stop": "E"}, {"stop": ["E", "xE"]}):
        prepared = complete(min_tokens=4, **fields)
        ids = ids_of("aExEyEz")
        for k in range(len(ids) + 1):
            choice = Choice(prepared, 0, MODEL_INFO)
            shown = join(choice.resume(ids[:k]))
            shown += join(choice.feed(TokenEvent("r", ids[k:], finish=FinishReason.LENGTH)))
            assert (shown, choice.stop, choice.completion_tokens) == ("aExEy", "E", 6)
    spelled = Choice(chat(min_tokens=10), 0, MODEL_INFO)
    deltas = tuple(b"<|im_end|>ok<|im_end|>no")
    assert join(spelled.feed(TokenEvent("r", deltas))) == "<|im_end|>ok"


def test_a_stop_string_of_half_a_character_at_the_end() -> None:
    """What the last tokens stand for is known once the answer has ended."""
    choice = Choice(complete(stop=["b\ufffd"]), 0, MODEL_INFO)
    shown = join(choice.feed(TokenEvent("r", ids_of("ab\u00e9")[:-1], finish=FinishReason.LENGTH)))
    assert (shown, choice.text, choice.stop, choice.finish_reason) == ("a", "a", "b\ufffd", "stop")
    assert choice.finish() == []


def test_known_tokens_have_logprobs_if_the_answer_does() -> None:
    with pytest.raises(ValueError, match="2 answered tokens with 0 logprobs"):
        Choice(complete(logprobs=0), 0, MODEL_INFO).resume((97, 98))
    with pytest.raises(ValueError, match="2 answered tokens with 1 logprobs"):
        Choice(complete(), 0, MODEL_INFO).resume((97, 98), (TokenLogprob(-1.0),))


def test_special_tokens_never_reach_content() -> None:
    """Neither as the token, nor spelled in deltas; other added tokens stay for the parsers."""
    prepared = chat()
    assert answer(prepared, "<think>a</think><|im_start|>b<|vision_end|>")[0].text == "<think>a</think>b"
    (choice,) = answer(prepared, "done<|im_")
    assert choice.text == "done<|im_"
    deltas = tuple(b"ok<|im_end|>more")
    spelled = Choice(prepared, 0, MODEL_INFO)
    assert join(spelled.feed(TokenEvent("r", deltas))) == "ok"
    assert (spelled.stopped, spelled.stop, spelled.finish_reason) == (True, None, "stop")
    free = chat(ignore_eos=True)
    shown = Choice(free, 0, MODEL_INFO)
    assert join(shown.feed(TokenEvent("r", deltas, finish=FinishReason.LENGTH))) == "ok<|im_end|>more"
    html = FakeModelInfo(tokenizer=metaspace_tokenizer(), chat_template="{{ messages[0].content }}")
    assert chat(html).control_stops == ()  # </s> is also HTML


def test_withheld_text_comes_at_the_end() -> None:
    prepared = chat(stop="<end>")
    choice = Choice(prepared, 0, MODEL_INFO)
    assert join(choice.feed(TokenEvent("r", ids_of("a<e")))) == "a"
    assert choice.finish_reason is None
    assert join(choice.feed(TokenEvent("r", finish=FinishReason.LENGTH, num_cached_tokens=2))) == "<e"
    assert (choice.text, choice.finish_reason, choice.cached_tokens, choice.finish()) == (
        "a<e",
        "length",
        2,
        [],
    )
    early = Choice(prepared, 0, MODEL_INFO)
    early.feed(TokenEvent("r", (*ids_of("a<e"), 0xE4)))
    assert join(early.finish()) == "<e\ufffd" and early.finish() == []


def test_an_error_event_is_raised() -> None:
    with pytest.raises(EngineDead):
        Choice(chat(), 0, MODEL_INFO).feed(
            TokenEvent("r", finish=FinishReason.ERROR, error=EngineDead("gone"))
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1.5}', {"a": 1.5}),
        ('{"a": 1e999}', {"a": "1e999"}),
        ('{"a": ' + "9" * 5000 + "}", {"a": "9" * 5000}),
    ],
)
def test_arguments_are_an_object(text: str, expected: Any) -> None:
    """A number that Python or JSON cannot represent stays text."""
    assert parse_arguments(text) == expected
