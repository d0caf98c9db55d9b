"""Answers that the request has begun. The prompt ends with the text exactly, and the
answer goes on from it in the state that it leaves; or there is an error, never another prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.anthropic.fields import BODY as MESSAGES
from mlxrun.api.choice import Choice
from mlxrun.api.openai.request import prepare_chat_prompt
from mlxrun.api.parsers.delta import PlainParser
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.responses.fields import BODY as RESPONSES
from mlxrun.api.text.continuation import ContinuationParser, get_continued_path
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.tools import read_offered_tools
from mlxrun.config.settings import Config, MediaSettings
from mlxrun.core.errors import RequestError
from mlxrun.core.request import FinishReason, TokenEvent
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.server.endpoints.tokenize import _tokenize_text
from tests.helpers.anthropic_api import ADD, CALL, body, count, text, user
from tests.helpers.anthropic_api import make as message
from tests.helpers.anthropic_api import refused as message_refused
from tests.helpers.openai_api import CHAT, COMPLETION, HI, TOOL, refused
from tests.helpers.openai_api import make as prepared
from tests.helpers.parser_corpus.core import CASES as CALLS
from tests.helpers.parser_corpus.reasoning import CASES as THOUGHTS
from tests.helpers.parser_driver import Call, Reasoning, run_parser
from tests.helpers.parser_driver import make_parser as parser_of
from tests.helpers.tokenizers import (
    CHATML,
    STRICT,
    TEXT_ONLY,
    THINKING,
    TOOLS,
    FakeModelInfo,
    byte_tokenizer,
    ids_of,
    metaspace_tokenizer,
)

Json = dict[str, Any]
FORMATS = choose_formats(None, [], "hermes", "think")
# As Qwen3's: reasoning in the content is written anew, and the last answer always has one.
REWRITES = CHATML.replace(
    "{{ text(m.content) }}",
    "{% set c = text(m.content) %}{% if m.role == 'assistant' %}"
    "{% set t = c.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in c else '' %}"
    "{{ '<think>\n' + t + '\n</think>\n\n' + c.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ c }}{% endif %}",
)


def begun(content: Any, **fields: Any) -> Json:
    received = {"continue_final_message": True, "add_generation_prompt": False, **fields}
    return {"messages": [*HI, {"role": "assistant", "content": content}], **received}


def prompt(given: Json, template: str = CHATML) -> str:
    return prepared(CHAT, given, FakeModelInfo(chat_template=template)).prompts[0]


# -- the prompt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["The", "The answer is ", " The", "a\n\n", "<think>\nHm", "ř<tool_", ""])
@pytest.mark.parametrize("template", [CHATML, STRICT, THINKING, TOOLS])
def test_the_prompt_ends_with_the_text(template: str, content: str) -> None:
    """Behind what any answer begins with, the text as it was sent. add_generation_prompt may be left out."""
    received = prompt({"messages": HI}, template)
    assert prompt(begun(content), template) == received + content
    assert prompt(begun(content, add_generation_prompt=None), template) == received + content
    made = prepared(CHAT, begun(content), FakeModelInfo(chat_template=template))
    assert made.continuation == content
    assert made.requests[0].prompt == ids_of(received + content)


def test_without_the_flag_it_is_a_turn_that_is_over() -> None:
    """The twin: as the APIs have it, the next message begins behind it."""
    given = begun("The", continue_final_message=False, add_generation_prompt=True)
    assert prompt(given).endswith("assistant\nThe<|im_end|>\n<|im_start|>assistant\n")
    assert prepared(CHAT, given).continuation == ""


def test_what_stands_before_the_text_is_the_template_s() -> None:
    """Reasoning in front of it, a space behind a name; neighbours are one message."""
    assert prompt(begun("The"), REWRITES).endswith("assistant\n<think>\n\n</think>\n\nThe")
    assert prompt(begun("<think>\nHm\n</think>\n\nThe"), REWRITES).endswith(
        "assistant\n<think>\nHm\n</think>\n\nThe"
    )
    assert prompt(begun("The"), TEXT_ONLY) == "[user] hi\n[assistant] The"
    two = begun("b")
    two["messages"].insert(1, {"role": "assistant", "content": "a"})
    assert prompt(two).endswith("assistant\na\n\nb")
    assert prompt(begun([text("a"), text("b")])).endswith("assistant\na\nb")


CHANGES = {
    "drops it": CHATML.replace("{{ text(m.content) }}", "{{ text(m.content) if m.role == 'user' }}"),
    "shouts": CHATML.replace("text(m.content)", "text(m.content) | upper"),
    "strips": CHATML.replace("text(m.content)", "text(m.content) | trim"),
    "shortens": CHATML.replace("text(m.content)", "text(m.content)[:3]"),
    "rewrites": REWRITES,
}


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("drops it", "The"),
        ("shouts", "The"),
        ("strips", " The"),
        ("strips", "\nThe"),  # the template's own line break stands before it: right by chance alone
        ("shortens", "The answer"),
        ("rewrites", "Hm</think>The"),
    ],
)
def test_a_template_that_changes_the_text(template: str, content: str) -> None:
    """A clear 400 that names the message; the same template without the flag renders."""
    model_info = FakeModelInfo(chat_template=CHANGES[template])
    error = refused(CHAT, begun(content), model_info)
    assert error.param == "messages[1].content" and "cannot be continued" in str(error)
    assert prepared(CHAT, begun(content, continue_final_message=None, add_generation_prompt=None), model_info)


def test_white_space_at_the_end_stays_where_a_template_strips() -> None:
    assert prompt(begun("The \n"), CHANGES["strips"]).endswith("assistant\nThe \n")


def test_what_cannot_be_continued() -> None:
    """By name. Fields of another endpoint name it."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    with_calls = begun("a")
    with_calls["messages"][-1]["tool_calls"] = [call]
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    cases: list[tuple[Json, str, str]] = [
        (
            begun("a", add_generation_prompt=True),
            "add_generation_prompt",
            "cannot be true together with continue",
        ),
        ({"messages": HI, "add_generation_prompt": False}, "add_generation_prompt", "only with"),
        (
            {"messages": HI, "continue_final_message": True},
            "continue_final_message",
            "messages[0] has role 'user'",
        ),
        ({"messages": [], "continue_final_message": True}, "messages", "at least one"),
        ({"messages": [1], "continue_final_message": True}, "messages[0]", "expected object"),
        (begun("a", continue_final_message="content"), "continue_final_message", "boolean"),
        (with_calls, "messages[1].tool_calls", "does not support tool calls"),
        (begun("a", response_format={"type": "json_object"}), "response_format", "not together"),
        (begun("a", guided_regex="x"), "guided_regex", "not together"),
        (begun("a", tools=[TOOL], tool_choice="required"), "tool_choice", "not together"),
        (begun("a", tools=[strict]), "tools[0].function.strict", "not together"),
        (begun(None), "messages[1].content", "missing"),
        (begun("a\ud800"), "messages[1].content", "surrogate"),
    ]
    for given, param, words in cases:
        error = refused(CHAT, given)
        assert (error.param, words in str(error)) == (param, True), error
    error = refused(COMPLETION, {"prompt": "x", "continue_final_message": True})
    assert error.param == "continue_final_message" and CHAT in str(error)
    assert (
        get_continued_path({"messages": HI, "add_generation_prompt": True, "continue_final_message": False})
        is None
    )


def test_where_the_fields_belong() -> None:
    """The other bodies refuse them by name; a raw prompt has no message to go on from."""
    for of, words in ((RESPONSES, CHAT), (MESSAGES, "unknown parameter")):
        for name in ("continue_final_message", "add_generation_prompt"):
            with pytest.raises(RequestError, match=words) as caught:
                of.check({name: True})
            assert caught.value.param == name
    for fields in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        with pytest.raises(RequestError, match="goes with messages") as caught:
            _tokenize_text({"prompt": "x", **fields}, FakeModelInfo())
        assert caught.value.param in fields
    assert _tokenize_text({"prompt": "x", "add_generation_prompt": True}, FakeModelInfo()) == _tokenize_text(
        {"prompt": "x"}, FakeModelInfo()
    )


# -- the answer -----------------------------------------------------------------------------------------


def answered(given: Json, *said: str, model_info: FakeModelInfo | None = None) -> Choice:
    """The answer to a body, with the formats of Hermes and of think tags."""
    model_info = model_info or FakeModelInfo(chat_template=TOOLS)
    made = dataclasses.replace(prepared(CHAT, given, model_info), formats=FORMATS)
    choice = Choice(made, 0, model_info)
    for part in said:
        choice.feed(TokenEvent("r", ids_of(part, model_info.tokenizer)))
    choice.feed(TokenEvent("r", finish=FinishReason.STOP))
    return choice


def describe(choice: Choice) -> tuple[str, str, list[tuple[str, str]]]:
    return choice.content, choice.reasoning, [(call.name, call.arguments) for call in choice.calls]


CALLING = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
WHOLE: list[list[tuple[str, str]]] = [  # what each delta of an answer is; a mark is none of them
    [("text", "The answer is 42.\n\nReally ")],
    [("text", "a <tool_box> and <th and </think> b <tool_call> c")],
    [("mark", "<think>\n"), ("reasoning", "hm < hm </th"), ("mark", "\n</think>\n\n"), ("text", "Yes <b>.")],
    [("text", "Let me see."), ("mark", "\n" + CALLING)],
    [("mark", "<think>"), ("reasoning", "hm"), ("mark", f"</think>\n{CALLING}\n"), ("text", "done")],
    [("mark", CALLING + "\n" + CALLING)],
    [("text", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> so')],
]


@pytest.mark.parametrize("case", range(len(WHOLE)))
def test_the_answer_is_what_follows_wherever_it_was_begun(case: int) -> None:
    """Cut at every place, text and reasoning are those behind the cut, and calls are whole."""
    deltas = WHOLE[case]
    whole = "".join(delta for _, delta in deltas)
    kinds = [kind for kind, delta in deltas for _ in delta]
    calls = [("add", '{"a": 1}')] * whole.count(CALLING)
    for at in range(len(whole) + 1):
        found = describe(answered(begun(whole[:at], tools=[TOOL]), whole[at:]))
        behind = list(zip(whole, kinds, strict=True))[at:]
        expected = ["".join(char for char, kind in behind if kind == each) for each in ("text", "reasoning")]
        assert found == (*expected, calls), (whole[:at], whole[at:])


def test_token_by_token_it_is_the_same() -> None:
    """A continued text that is part of a marker is not returned again, however the rest comes."""
    for at in range(1, 12):
        rest = CALLING[at:]
        assert describe(answered(begun(CALLING[:at], tools=[TOOL]), *rest))[2] == [("add", '{"a": 1}')]
        box = "<tool_call_box>"
        assert describe(answered(begun(box[:at], tools=[TOOL]), *box[at:])) == (box[at:], "", [])
    cut = answered(begun("a <tool", tools=[TOOL]))
    assert describe(cut) == ("", "", []) and cut.finish_reason == "stop"
    assert answered(begun(CALLING[:20], tools=[TOOL]), CALLING[20:]).finish_reason == "tool_calls"


def test_a_parser_that_has_not_read_the_text_is_wrong() -> None:
    """The twin: without the state that the text leaves, reasoning and calls are taken for text."""
    for start, rest in (("<think>\nFirst", ", hm</think>Yes"), (CALLING[:20], CALLING[20:])):
        given = begun(start, tools=[TOOL])
        right = describe(answered(given, rest))
        made = dataclasses.replace(prepared(CHAT, given, FakeModelInfo(chat_template=TOOLS)), formats=FORMATS)
        blind = dataclasses.replace(made, continuation="")
        choice = Choice(blind, 0, FakeModelInfo(chat_template=TOOLS))
        choice.feed(TokenEvent("r", ids_of(rest), finish=FinishReason.STOP))
        assert describe(choice) != right and describe(choice) == (rest, "", [])
    repeated = PlainParser()
    assert "".join(d.text for d in [*repeated.feed("The"), *repeated.feed(" end")]) == "The end"
    parser = ContinuationParser(PlainParser, "The")
    assert "".join(d.text for d in [*parser.feed(" end"), *parser.finish()]) == " end"


def test_text_that_was_withheld_comes_once() -> None:
    """Also where a parser gives it in parts, or never."""

    class Slow(PlainParser):
        def __init__(self) -> None:
            self.kept = ""

        def feed(self, text: str) -> Sequence[Any]:
            self.kept += text
            if len(self.kept) < 4:
                return []
            given, self.kept = self.kept[:2], self.kept[2:]
            return super().feed(given)

        def finish(self, stopped: bool = False) -> Sequence[Any]:
            return super().feed(self.kept)

    for rest in ("", "d", "def", "defghi"):
        parser = ContinuationParser(Slow, "abc")
        made = [d for char in rest for d in parser.feed(char)] + [*parser.finish()]
        assert "".join(d.text for d in made) == rest


@pytest.mark.parametrize("rest", ["", "\n", "\n- a", " b", "\n\nc"])
@pytest.mark.parametrize("begun_text", ["List:\n", "Well, ", "a\n\n", "\n", ""])
def test_white_space_behind_white_space_stays_without_parsers(begun_text: str, rest: str) -> None:
    """Also if the model repeats the white space that the text ends with."""
    for texts in ([rest], list(rest)):
        parser = ContinuationParser(PlainParser, begun_text)
        deltas = [delta for each in texts for delta in parser.feed(each)] + [*parser.finish()]
        assert "".join(delta.text for delta in deltas) == rest


def test_a_space_goes_on_from_the_text() -> None:
    """A tokenizer that drops a text's first space keeps it in the middle."""
    model_info = FakeModelInfo(tokenizer=metaspace_tokenizer(), chat_template=TEXT_ONLY)
    world = (metaspace_tokenizer().convert_tokens_to_ids("\u2581world"),)
    for given, expected in ((begun("hello"), " world"), ({"messages": HI}, "world")):
        choice = Choice(prepared(CHAT, given, model_info), 0, model_info)
        choice.feed(TokenEvent("r", world, finish=FinishReason.STOP))
        assert choice.content == choice.text == expected


def test_a_completion_goes_on_from_its_prompt() -> None:
    """The space that parts the first word of a completion from its prompt, text or ids, is text."""
    tokenizer = metaspace_tokenizer()
    model_info = FakeModelInfo(tokenizer=tokenizer)
    hello, world, end = tokenizer.convert_tokens_to_ids(["\u2581hello", "\u2581world", "</s>"])
    byte = tokenizer.convert_tokens_to_ids("<0xC5>")

    def said(prompts: Any, at: int = 0) -> str:
        choice = Choice(prepared(COMPLETION, {"prompt": prompts}, model_info), at, model_info)
        choice.feed(TokenEvent("r", (world, world), finish=FinishReason.STOP))
        return choice.text

    for prompts in ("hello", [hello], [hello, end], [end] * 50 + [hello], [hello, byte]):
        assert said(prompts) == " world world", prompts
    assert said(["hello", "a"], 1) == " world world"
    assert said([end]) == "world world"  # the twin: nothing stands before it


def test_a_budget_counts_in_open_reasoning() -> None:
    """Reasoning that the text has begun is closed when the answer's own tokens of it are used up."""
    model_info = FakeModelInfo(chat_template=TOOLS)
    context = ApiContext(model_info, Config(), MediaLoader(MediaSettings(), None), FORMATS)
    stop = frozenset({byte_tokenizer().eos_token_id})

    def closes(content: str) -> bool:
        made = prepare_with(context, begun(content, thinking_budget=2))
        assert made.requests[0].grammar is not None
        row = made.requests[0].grammar.start((), stop)
        for token in ids_of("xy"):
            row.accept(token)
        return sum(byte.bit_count() for byte in row.mask()) == 1

    assert closes("<think>\nHm") and closes("<think>")
    assert not closes("The") and not closes("<think>Hm</think>")


def prepare_with(context: ApiContext, given: Json) -> PreparedRequest:
    import asyncio

    from mlxrun.api.openai.request import prepare_request

    return asyncio.run(prepare_request(CHAT, given, context))


# -- Anthropic ------------------------------------------------------------------------------------------


def ends(*blocks: Any, **fields: Any) -> Json:
    return body([*user(text("hi")), {"role": "assistant", "content": [*blocks]}], **fields)


def test_the_last_message_begins_the_answer() -> None:
    """The assistant's last message, a string or blocks of text; an empty one begins nothing."""
    received = message(body(user(text("hi")))).prepared.prompts[0]
    for last in (ends(text("The")), ends(text("T"), text("he")), body([*user(text("hi")), said("The")])):
        made = message(last).prepared
        assert made.prompts[0] == received + "The" and made.continuation == "The"
        assert prompt(begun("The")) == made.prompts[0]
    for nothing in (ends(), body([*user(text("hi")), said("")]), ends(text(""))):
        assert message(nothing).prepared.prompts[0] == received
    two = body([*user(text("hi")), said("a"), said("b")])
    assert message(two).prepared.prompts[0] == received + "a\n\nb"


def said(content: str) -> Json:
    return {"role": "assistant", "content": content}


def test_counted_as_it_is_computed() -> None:
    """Count_tokens and /tokenize count the same prompt; what is no beginning counts as a turn."""
    for given in (ends(text("The")), ends(), ends(text("<think>Hm"))):
        counted = {key: value for key, value in given.items() if key != "max_tokens"}
        assert count(counted) == len(message(given).prepared.requests[0].prompt)
    over = {"model": "m", **ends(text("The "))}
    del over["max_tokens"]
    assert count(over) > count({**over, "messages": [*user(text("hi")), said("The")]}) + 2


THINKS = {"type": "enabled", "budget_tokens": 2000}
ENOUGH = {"max_tokens": 2001}
SCHEMA = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (ends(text("The ")), "messages.1.content", "cannot end with trailing whitespace"),
        (body([*user(text("hi")), said("The\n")]), "messages.1.content", "trailing whitespace"),
        (ends(text("The"), thinking=THINKS, **ENOUGH), "thinking", "which the answer continues"),
        (ends(text("The"), thinking={"type": "adaptive"}), "thinking", "which the answer continues"),
        (
            ends(text("The"), tools=[ADD], tool_choice={"type": "any"}),
            "tool_choice",
            "which the answer continues",
        ),
        (ends(text("The"), tools=[{**ADD, "strict": True}]), "tools.0.strict", "which the answer continues"),
        (ends(text("The"), output_config=SCHEMA), "output_config.format", "which the answer continues"),
        (ends(CALL), "messages.1.content.0", "without `tool_result`"),
        (ends({"type": "thinking", "thinking": "x", "signature": "y"}), "messages.1.content", "'thinking'"),
        (ends({"type": "redacted_thinking", "data": "x"}, text("a")), "messages.1.content", "redacted"),
    ],
)
def test_what_begins_no_answer(given: Json, param: str, words: str) -> None:
    """By name, in Anthropic's words where it has some. Counting takes it as a turn that is over."""
    error = message_refused(given, FakeModelInfo(chat_template=TOOLS))
    assert error.param == param and words in str(error)
    counted = {key: value for key, value in given.items() if key != "max_tokens"}
    assert count(counted, FakeModelInfo(chat_template=TOOLS)) > 5
    assert message({**given, "thinking": {"type": "disabled"}} if param == "thinking" else body())


def test_an_empty_message_behind_another_of_the_assistant() -> None:
    """The one before it is what is judged, also where tokens are only counted."""
    turns = [*user(text("hi")), said("The"), said("")]
    made = message(body(turns)).prepared
    assert made.continuation == "The" and made.prompts[0] == message(ends(text("The"))).prepared.prompts[0]
    error = message_refused(body([*user(text("hi")), said("The "), said("")]))
    assert error.param == "messages.1.content" and "trailing whitespace" in str(error)
    model_info = FakeModelInfo(chat_template=TOOLS)
    called = {"model": "m", "messages": [*user(text("hi")), {"role": "assistant", "content": [CALL]}]}
    assert count({**called, "messages": [*called["messages"], said("")]}, model_info) == count(
        called, model_info
    )


def test_a_template_that_changes_the_text_is_led_back() -> None:
    error = message_refused(ends(text("The")), FakeModelInfo(chat_template=CHANGES["shouts"]))
    assert error.param == "messages.1.content" and "cannot be continued" in str(error)


# -- the other ways in ----------------------------------------------------------------------------------


async def test_a_job_takes_it_too(tmp_path: Path) -> None:
    """The same code prepares it: the same prompt as the server's."""
    preparer = LinePreparer(FakeModelInfo(), Config(), tmp_path)
    made = (await preparer.prepare(JobLine(1, "a", CHAT, begun("The")))).prepared
    assert made.continuation == "The" and made.prompts[0].endswith("<|im_start|>assistant\nThe")


async def test_checked_once() -> None:
    """Tools are looked at once a request, also where a prompt is only counted."""
    from mlxrun.api.openai import request
    from mlxrun.api.text import tools as offered

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        check = offered.check_tools
        patch.setattr(offered, "check_tools", lambda tools: seen.append(1) or check(tools))
        loader = MediaLoader(MediaSettings(), None)
        context = ApiContext(FakeModelInfo(chat_template=TOOLS), Config(), loader)
        await request.prepare_request(CHAT, {"messages": HI, "tools": [TOOL]}, context)
        assert seen == [1]
        await prepare_chat_prompt(
            {"messages": HI}, read_offered_tools({"messages": HI, "tools": [TOOL]}), context
        )
        assert seen == [1, 1]


def test_every_format_goes_on() -> None:
    """The whole corpus of parsers, begun at four places each: no call is lost, and nothing is said
    twice but what is left of a call that the model breaks behind its first argument."""
    for case in (*CALLS, *THOUGHTS):
        whole = sorted_out(run_parser(partial(parser_of, case), [case.text]))
        size = len(case.text)
        for at in {size // 5, size // 2, size * 4 // 5, size}:
            start, rest = case.text[:at], case.text[at:]
            make = partial(ContinuationParser, partial(parser_of, case), start)
            found = sorted_out(run_parser(make, [rest] if rest else []))
            assert found[2] == whole[2], (case.id, start)
            assert whole[0].endswith(found[0]) and whole[1].endswith(found[1]), (case.id, start)
            assert len(found[0]) + len(found[1]) <= len(rest) or found[2], (case.id, start)


def sorted_out(items: Sequence[Any]) -> tuple[str, str, list[Call]]:
    """The text, the reasoning and the calls of an answer."""
    texts = "\n".join(item for item in items if isinstance(item, str))
    reasoning = "\n".join(item.text for item in items if isinstance(item, Reasoning))
    return texts, reasoning, [item for item in items if isinstance(item, Call)]
