"""What chat templates of real shapes are found to render, and that they are asked once."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.messages import MessageSupport, normalize_messages
from mlxrun.api.text.templates.template import render_chat
from mlxrun.api.text.templates.template_support import get_message_support
from mlxrun.config.settings import Config
from tests.helpers.openai_api import TOOL, chat
from tests.helpers.tokenizers import CHATML, STRICT, SYSTEM_ONLY_FIRST, TEXT_ONLY, FakeModelInfo

_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ text(m.content) }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} ARGUMENTS</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
_MACRO = CHATML.partition("{% endmacro %}")[0] + "{% endmacro %}"


def write_calls(arguments: str) -> str:
    return _MACRO + _CALLS.replace("ARGUMENTS", arguments)


# How the templates of model families write arguments: the two kinds of arguments that each renders.
SHAPES = {
    "qwen": (
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
        2,
    ),
    "llama": ("{{ c.function.arguments | tojson }}", 2),
    "qwen coder": (
        "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}",
        1,
    ),
    "glm": (
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>{{ v }}{% endfor %}",
        1,
    ),
    "deepseek": ("{{ '```json\n' + c.function.arguments + '\n```' }}", 0),
}
# A system message after the first message raises, is taken for the only one, or stays where it is.
RAISING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}{% endfor %}" + CHATML
)
LIFTING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}"
)
DROPPING = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}] {{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "late"),
    [
        (CHATML, True),
        (TEXT_ONLY, True),
        (STRICT, False),
        (SYSTEM_ONLY_FIRST, False),
        (RAISING, False),
        (LIFTING, False),
        (DROPPING, False),
        ("{% if %}", False),
    ],
)
def test_late_system_messages(template: str, late: bool) -> None:
    assert get_message_support(FakeModelInfo(chat_template=template)).late_system is late


@pytest.mark.parametrize("shape", list(SHAPES))
def test_arguments(shape: str) -> None:
    """Broken arguments of a call are in the prompt, whatever the template does with arguments."""
    arguments, kinds = SHAPES[shape]
    model = FakeModelInfo(chat_template=write_calls(arguments))
    support = get_message_support(model)
    assert (support.object_arguments, support.text_arguments) == ((kinds > 0), kinds != 1)
    for sent in ('{"city": "Praha"}', '{"city": "Praha', "[1]", "Praha"):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": sent}}
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "Error: not JSON"},
        ]
        text = render_chat(model, normalize_messages(turns, support).messages, [TOOL], {})
        assert ("Praha" if "Praha" in sent else "[1]") in text and "Error: not JSON" in text


def test_images_of_results() -> None:
    """Kept in tool messages if they are marked there as in a user's message."""
    keeps = write_calls("{{ c.function.arguments | tojson }}")
    drops = keeps.replace("{{ text(m.content) }}", "{{ m.content if m.role == 'tool' else text(m.content) }}")
    hides = keeps.replace(
        "{{ text(m.content) }}", "{% if m.role != 'tool' %}{{ text(m.content) }}{% else %}Zqr{% endif %}"
    )
    found = [
        get_message_support(FakeModelInfo(chat_template=template, vision=True)).tool_images
        for template in (keeps, drops, hides, CHATML)
    ]
    assert found == [True, False, False, False]
    assert not get_message_support(FakeModelInfo(chat_template=keeps)).tool_images


# As Mistral's templates: exactly nine characters, or at least nine.
@pytest.mark.parametrize("refused", ["length != 9", "length < 9"])
def test_ids_of_calls(refused: str) -> None:
    """Ids of other servers are replaced where the template refuses them, and stay elsewhere."""
    shown = "{{ c.id }} {{ c.function.arguments | tojson }}"
    check = "{% if c.id | REFUSED %}{{ raise_exception('length 9!') }}{% endif %}".replace("REFUSED", refused)
    free, strict = (FakeModelInfo(chat_template=write_calls(each)) for each in (shown, check + shown))
    assert get_message_support(free).any_call_ids and not get_message_support(strict).any_call_ids
    for sent in ("call_abcdefghijklmnopqrstuvwx", "toolu_1", "functions.add:0", "461d44ad8"):
        call = {"id": sent, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": sent, "content": "1"},
        ]
        messages = normalize_messages(turns, get_message_support(strict)).messages
        assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
        assert "Zq" not in render_chat(strict, messages, [TOOL], {})
        messages = normalize_messages(turns, get_message_support(free)).messages
        assert sent in render_chat(free, messages, [TOOL], {})


def measure_shared(template: str) -> float:
    """The part of a long chat that is shared with the prompt before; every turn has a late reminder."""
    model = FakeModelInfo(chat_template=template)
    turns: list[Any] = [{"role": "system", "content": "You are an agent. " * 20}]
    shared = total = 0
    before = ""
    for i in range(10):
        turns += [
            {"role": "user", "content": f"task {i} " * 20},
            {"role": "system", "content": f"reminder {i}"},
        ]
        text = chat(model, messages=turns).prompts[0]
        shared += len(os.path.commonprefix([before, text])) if before else 0
        total += len(before)
        before = text
        turns.append({"role": "assistant", "content": f"done {i} " * 20})
    return shared / total


def test_late_system_messages_keep_the_prefix_of_the_chat() -> None:
    """In place, each prompt begins with the one before; in front, every reminder changes all that follows."""
    assert measure_shared(CHATML) > 0.99
    assert measure_shared(RAISING) < 0.5


def test_a_model_without_template() -> None:
    assert get_message_support(FakeModelInfo(chat_template=None)) == MessageSupport()


def test_templates_are_asked_once_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests render their own conversation, with one stand-in for each boundary, and ask nothing else."""
    template = CHATML + "{# asked once #}"
    model = FakeModelInfo(chat_template=template, vision=True)
    rendered: list[Any] = []
    real = type(model.tokenizer).apply_chat_template

    def count(self: Any, messages: Any, **options: Any) -> Any:
        rendered.append(messages)
        return real(self, messages, **options)

    monkeypatch.setattr(type(model.tokenizer), "apply_chat_template", count)
    config = Config()
    ApiContext(model, config, MediaLoader(config.media, None))
    at_load = len(rendered)
    assert at_load > 0
    for _ in range(3):
        chat(model, messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "own words"}])
    later = rendered[at_load:]
    assert len(later) <= 3 * 3
    assert all(messages[0]["content"] == "s" for messages in later)
