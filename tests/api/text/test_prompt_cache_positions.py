"""Boundaries of chat prompts. Each is a true common prefix of the tokens of whole prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mlxrun.api.text import prompt as module
from mlxrun.api.text.messages import normalize_messages
from mlxrun.api.text.prompt import (
    MIN_TOKENS,
    RenderedPrompt,
    build_chat_prompt,
    build_raw_prompt,
    find_cache_positions,
    make_variants,
    map_to_expanded,
)
from mlxrun.api.text.templates.template import render_chat
from mlxrun.api.text.tokens import tokens as tokens_module
from mlxrun.api.text.tokens.tokens import PromptTokens, tokenize
from mlxrun.core.errors import RequestError
from mlxrun.core.request import ProcessedPrompt
from tests.helpers.examples import count_examples
from tests.helpers.odd_tokenizers import TEXTS, TOKENIZERS, nasty_tokenizer, true_lcp
from tests.helpers.tokenizers import (
    CHATML,
    STRICT,
    SYSTEM_ONLY_FIRST,
    TEXT_ONLY,
    THINKING,
    TOOLS,
    FakeModelInfo,
    ids_of,
)

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RED = Image.new("RGB", (2, 2), "red")
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
SYSTEM = {"role": "system", "content": "be brief and never say anything that is not true"}

# Earlier answers lose their reasoning, as in Qwen 3.
STRIPS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n"
)
# The last answer is written otherwise than the others.
REWRITES = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 == ns.last %}<think>\n\n</think>{{ m.content | trim }}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
# Neighbours of one role, and tools with users, share a header.
MERGES_ROLES = (
    "{% for m in messages %}{% set role = 'user' if m.role == 'tool' else m.role %}"
    "{% if loop.first or role != ('user' if loop.previtem.role == 'tool' else loop.previtem.role) %}"
    "<|im_start|>{{ role }}{% endif %}\n{{ m.content | trim }}"
    "{% if loop.last or role != ('user' if loop.nextitem.role == 'tool' else loop.nextitem.role) %}"
    "<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
# The system text stands before the last user turn, as in Mistral's.
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
TEMPLATES = (
    *(CHATML, STRICT, SYSTEM_ONLY_FIRST, TEXT_ONLY, THINKING, TOOLS),
    *(STRIPS, REWRITES, MERGES_ROLES, SYSTEM_LAST),
)


def turn(roles: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    turns = st.fixed_dictionaries({"role": st.sampled_from(roles), "content": TEXTS})
    return turns.map(lambda t: t | {"tool_call_id": "c"} if t["role"] == "tool" else t)


CHATS = st.tuples(
    st.lists(turn(["system", "developer"]), max_size=2),
    st.lists(turn(["user", "assistant", "assistant", "tool"]), max_size=6),
).map(lambda parts: [*parts[0], *parts[1]])


def prompt_of(model_info: FakeModelInfo, messages: list[Any], tools: Any = None) -> RenderedPrompt:
    return build_chat_prompt(model_info, normalize_messages(messages).messages, [], tools, {})


@settings(max_examples=count_examples(300), deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.sampled_from(TEMPLATES), CHATS.filter(bool), st.booleans())
def test_a_boundary_is_a_true_common_prefix(name: str, template: str, chat: list[Any], tools: bool) -> None:
    """Never behind the point where the tokens of two whole conversations part."""
    model_info = FakeModelInfo(tokenizer=TOKENIZERS[name](), chat_template=template)
    messages, given_tools = normalize_messages(chat).messages, [TOOL] if tools and template == TOOLS else None
    try:
        text = render_chat(model_info, messages, given_tools, {})
    except RequestError:
        return
    ids = ids_of(text, model_info.tokenizer)
    lcps = set()
    for variant in make_variants(messages):
        try:
            other = render_chat(model_info, variant, given_tools, {})
        except RequestError:
            continue
        lcps.add(true_lcp(ids, ids_of(other, model_info.tokenizer)))
    found = prompt_of(model_info, chat, given_tools).cache_positions
    assert found == tuple(sorted(p for p in lcps if MIN_TOKENS <= p < len(ids)))


def test_the_same_system_and_another_user() -> None:
    """The boundary is where two such prompts part, and both have it; also after the tools."""
    for template, tools in ((CHATML, None), (TOOLS, [TOOL]), (STRICT, None)):
        model_info = FakeModelInfo(chat_template=template)
        one, two = (
            prompt_of(model_info, [SYSTEM, {"role": "user", "content": text}], tools)
            for text in ("what is one?", "and two?")
        )
        part = true_lcp(one.ids, two.ids)
        assert one.cache_positions == two.cache_positions == (part,)
        assert model_info.tokenizer.decode(one.ids[:part]).endswith("<|im_start|>user\n")


def test_a_prefix_alone_would_have_other_tokens() -> None:
    """The end of a prefix merges with what follows, so its own tokens are not those of the prompt."""
    model_info = FakeModelInfo(tokenizer=nasty_tokenizer(split=False, normalise=False))
    prompt = prompt_of(model_info, [SYSTEM, {"role": "user", "content": "\nall"}])
    alone = ids_of(prompt.text[: prompt.text.index("\nall")], model_info.tokenizer)
    assert alone[-1] == model_info.tokenizer.convert_tokens_to_ids("r\u010a")
    assert prompt.ids[: len(alone)] != alone
    (boundary,) = prompt.cache_positions
    assert boundary < len(alone) and prompt.ids[:boundary] == alone[:boundary]


@pytest.mark.parametrize("template", [CHATML, STRIPS, REWRITES, STRICT])
def test_every_turn_of_a_chat_has_the_boundary_of_the_one_before(template: str) -> None:
    """What is saved at a turn's boundary is a prefix of the next turn's prompt, reasoning gone or not."""
    model_info = FakeModelInfo(chat_template=template)
    chat: list[Any] = [SYSTEM]
    before: RenderedPrompt | None = None
    for i in range(6):
        chat.append({"role": "user", "content": f"{i} is the question"})
        prompt = prompt_of(model_info, chat)
        assert prompt.text[: prompt.text.index("<|im_start|>user")] == (
            f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
        )
        system = len(ids_of(prompt.text[: prompt.text.index("0 is the")]))
        assert prompt.cache_positions[0] == system
        if template != REWRITES and i:
            last = len(ids_of(prompt.text[: prompt.text.index(f"{i} is the")]))
            assert prompt.cache_positions == (system, last)
        if before is not None:
            shared_by_both = true_lcp(before.ids, prompt.ids)
            assert before.cache_positions[0] <= shared_by_both
            if template != REWRITES:
                assert before.cache_positions[-1] <= shared_by_both
        before = prompt
        chat.append({"role": "assistant", "content": f"<think>\nhm {i}\n</think>\n\nthe answer {i}"})


def agent(turns: int) -> list[Any]:
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat: list[Any] = [SYSTEM, {"role": "user", "content": "add them all"}]
    for i in range(turns):
        chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
        chat.append({"role": "tool", "tool_call_id": "1", "content": f"{i + 1} it is"})
    return chat


@pytest.mark.parametrize("last", ["tool", "assistant"])
def test_an_agent_has_the_start_of_the_last_message(last: str) -> None:
    """After one user turn come many of the agent's own."""
    model_info = FakeModelInfo(chat_template=TOOLS)
    chat = agent(3)[: None if last == "tool" else -1]
    prompt = prompt_of(model_info, chat, [TOOL])
    starts = [
        len(ids_of(prompt.text[: at + len(f"<|im_start|>{role}\n")]))
        for role, at in (("user", prompt.text.index("<|im_start|>user")), (last, _last(prompt.text, last)))
    ]
    assert prompt.cache_positions == tuple(starts)


def _last(text: str, role: str) -> int:
    return text.rindex(f"<|im_start|>{role}", 0, len(text) - len("<|im_start|>assistant\n"))


@pytest.mark.parametrize(
    ("roles", "cuts"),
    [
        ("s", [1]),
        ("u", [0]),
        ("su", [1]),
        ("suau", [1, 3]),
        ("uau", [0, 2]),
        ("suatat", [1, 5]),
        ("uata", [0, 3]),
        ("suauat", [1, 3]),
        ("sat", [1, 2]),
        ("a", [0]),
        ("suauauau", [1, 7]),
    ],
)
def test_which_messages_are_replaced(roles: str, cuts: list[int]) -> None:
    """System, last user turn, and the last message if there is time for it: two more renderings at most."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[r], "content": f"{i} said"} for i, r in enumerate(roles)]
    found = make_variants(messages)
    assert [len(variant) - 1 for variant in found] == cuts
    for cut, variant in zip(cuts, found, strict=True):
        assert variant[:-1] == messages[:cut]
        if cut < len(messages):
            assert variant[-1]["content"][0] != messages[cut]["content"][0]
    assert found[0][-1]["role"] == "user"


@pytest.mark.parametrize("content", ["Zebra", " \n Zebra", "0", "", "x"])
def test_the_other_text_begins_otherwise(content: str) -> None:
    """Also where a template strips it, and for parts; the name stays, the reasoning does not."""
    for shape in (content, [{"type": "text", "text": content}, {"type": "image"}]):
        (variant,) = make_variants([{"role": "user", "name": "me", "content": shape}])
        said = variant[0]["content"]
        assert type(said) is type(shape) and variant[0]["name"] == "me"
        assert (said if isinstance(said, str) else said[0]["text"])[0] != (content.strip() or " ")[0]
    last = {"role": "assistant", "content": "x", "reasoning": "so", "tool_calls": [1]}
    assert make_variants([SYSTEM, {"role": "user", "content": "x"}, last])[1][-1].keys() == {
        "role",
        "content",
    }


def test_a_template_that_refuses_a_variant_gives_no_boundary(caplog: pytest.LogCaptureFixture) -> None:
    """The prompt itself is as good as before, and nothing of it is in the log."""
    needs = "{% if 'hello' not in messages[-1].content %}{{ raise_exception('say hello') }}{% endif %}"
    model_info = FakeModelInfo(chat_template=needs + CHATML)
    with caplog.at_level(logging.DEBUG, logger="mlxrun"):
        prompt = prompt_of(model_info, [SYSTEM, {"role": "user", "content": "hello, secret"}])
    assert prompt.cache_positions == () and prompt.ids == ids_of(prompt.text)
    assert "no cache position: the chat template rejects the first 2 messages" in caplog.text
    assert "secret" not in caplog.text


def test_short_prefixes_and_whole_prompts_are_no_boundaries() -> None:
    model_info = FakeModelInfo()
    assert prompt_of(model_info, [{"role": "user", "content": "x" * 50}]).cache_positions == ()
    constant = FakeModelInfo(chat_template="the same whatever is said to it")
    assert prompt_of(constant, [{"role": "user", "content": "hi"}]).cache_positions == ()
    assert build_raw_prompt(model_info, "<|im_start|>user\n" * 9, "prompt").cache_positions == ()


def test_a_long_chat_is_rendered_three_times_and_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost: of what two texts share only the last message is tokenised again."""
    rendered: list[int] = []
    tokenised: list[int] = []

    def counting_render(*args: Any) -> str:
        rendered.append(1)
        return render_chat(*args)

    def counting_tokenize(model_info: Any, text: str, *, add_special_tokens: bool) -> PromptTokens:
        tokenised.append(len(text))
        return tokenize(model_info, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(module, "render_chat", counting_render)
    monkeypatch.setattr(tokens_module, "tokenize", counting_tokenize)
    chat = [SYSTEM]
    for i in range(100):
        chat += [{"role": "user", "content": f"{i} " * 40}, {"role": "assistant", "content": f"a{i} " * 40}]
    prompt = prompt_of(FakeModelInfo(), [*chat, {"role": "user", "content": "and now?"}])
    assert len(prompt.cache_positions) == 2 and len(prompt.text) > 20_000
    assert len(rendered) == 3
    assert sum(tokenised) < 600


# Images.


class Wide(FakeModelInfo):
    """Writes empty lines around an image, as Gemma 3's processor does."""

    def process(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
        return super().process(text.replace(MARK, f"\n\n{MARK}\n\n"), images)


class Rows(FakeModelInfo):
    """Two spans an image with a token between them, as tiling processors write."""

    def process(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
        return super().process(text.replace(MARK, f"{MARK}+{MARK}"), [*images, *images])


IMAGE_TURN = st.lists(st.sampled_from(["image", "hi", "\n", "Zq"]), min_size=1, max_size=4).map(
    lambda words: [{"type": "image"} if w == "image" else {"type": "text", "text": w} for w in words]
)


@settings(max_examples=count_examples(200), deadline=None)
@given(
    st.sampled_from([FakeModelInfo, Wide, Rows]), st.lists(IMAGE_TURN, min_size=1, max_size=4), st.booleans()
)
def test_boundaries_among_images(kind: type[FakeModelInfo], turns: list[Any], system: bool) -> None:
    """With images: true common prefixes of the expanded tokens, never within an image."""
    model_info = kind(vision=True)
    messages: list[Any] = [SYSTEM] if system else []
    for content in turns:
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "I see"}]
    messages.pop()
    prompt, lcps = image_prompt(model_info, messages), set()
    for variant in make_variants(messages):
        lcps.add(true_lcp(prompt.ids, image_prompt(model_info, variant).ids))
    expected = tuple(sorted(p for p in lcps if MIN_TOKENS <= p < len(prompt.ids)))
    if kind is FakeModelInfo:
        assert prompt.cache_positions == expected
    for p in prompt.cache_positions:
        assert any(p <= lcp for lcp in expected)
        assert not any(start < p < end for start, end in prompt.image_spans)


def image_prompt(model_info: FakeModelInfo, messages: list[Any]) -> RenderedPrompt:
    parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
    return build_chat_prompt(
        model_info, messages, [RED] * sum(part["type"] == "image" for part in parts), None, {}
    )


@pytest.mark.parametrize("kind", [FakeModelInfo, Wide, Rows])
def test_a_question_after_an_image(kind: type[FakeModelInfo]) -> None:
    """The start of the last user turn lies behind the image, so it moves with what the image takes."""
    model_info = kind(vision=True)
    first = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    answered = [SYSTEM, first, {"role": "assistant", "content": "red"}]
    prompt = image_prompt(model_info, [*answered, {"role": "user", "content": "are you sure?"}])
    other = image_prompt(model_info, [*answered, {"role": "user", "content": "look again!"}])
    assert prompt.cache_positions[-1] == true_lcp(prompt.ids, other.ids) > prompt.image_spans[-1][1]
    assert len(prompt.cache_positions) == 2 and prompt.cache_positions[0] <= prompt.image_spans[0][0]


def test_positions_that_cannot_be_mapped_are_left_out() -> None:
    ids = (*range(20), 99, 99, *range(30, 50), 99, *range(60, 80))
    wide = (*range(20), *[99] * 10, *range(30, 50), 7, *[99] * 5, 8, *range(60, 80))
    spans = ((20, 30), (51, 56))
    assert map_to_expanded((15,), ids, wide, spans) == ()
    assert map_to_expanded((16, 20), ids, wide, spans) == (16, 20)
    assert map_to_expanded((21,), ids, wide, spans) == ()
    assert map_to_expanded((22, 42), ids, wide, spans) == (30, 50)
    assert map_to_expanded((43, 50, 63), ids, wide, spans) == (57, 64)
    # The text itself again behind the image; a mark that is not what fills the span.
    assert map_to_expanded((16,), ids, (*ids[:20], 7, 8, 8, *ids), ((21, 23),)) == (16,)
    other = (*range(20), 98, *range(30, 50))
    assert map_to_expanded((20,), other, (*range(20), 99, 99, *range(30, 50)), ((20, 22),)) == (20,)
    assert map_to_expanded((16, 40), ids, ids, ()) == (16, 40)
    assert map_to_expanded((16, 30), ids, (1, 2, 3), ((0, 3),)) == ()


def test_boundaries_of_a_text_without_positions() -> None:
    """Without an encoding (tokenizers that are not fast) all is tokenised, and the result is the same."""
    model_info, messages = (
        FakeModelInfo(),
        normalize_messages([SYSTEM, {"role": "user", "content": "hi"}]).messages,
    )
    tokens = tokenize(model_info, render_chat(model_info, messages, None, {}), add_special_tokens=False)
    plain = PromptTokens(tokens.text, tokens.ids)
    assert (
        find_cache_positions(model_info, plain, messages, None, {})
        == find_cache_positions(model_info, tokens, messages, None, {})
        != ()
    )
