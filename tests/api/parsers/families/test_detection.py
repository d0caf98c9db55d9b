"""Which family a template belongs to, ids of calls, texts around arguments, and when arguments come."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.parsers.registry import (
    TOOL_CALL_FAMILIES,
    choose_formats,
    find_reasoning_family,
    find_tool_call_family,
)
from tests.helpers.parser_corpus import core, malformed, well_formed
from tests.helpers.parser_corpus.call_formats import FORMATS
from tests.helpers.parser_corpus.templates import TEMPLATES
from tests.helpers.parser_corpus.well_formed import FIRST
from tests.helpers.parser_driver import (
    TOOLS,
    Call,
    Case,
    make_parser,
    make_tool_call_parser,
    run_parser,
)

# One reader reads both; the template belongs to the family that the registry has first.
_SHARED = {("step", "qwen3_coder"), ("ernie45", "hermes"), ("jamba", "hermes"), ("ling3", "glm")}
_WITHOUT_TEMPLATE = {"ui_tars"}  # its prompts show the format, not its template


@pytest.mark.parametrize(("family", "which", "template", "tokens"), TEMPLATES, ids=[t[1] for t in TEMPLATES])
def test_a_template_belongs_to_one_family(
    family: str, which: str, template: str, tokens: tuple[str, ...]
) -> None:
    """`auto` knows the family by its template, and no other family claims it."""
    claims = [f.name for f in TOOL_CALL_FAMILIES if f.detect(template, frozenset(tokens))]
    assert claims[0] == family, which
    assert all((family, other) in _SHARED for other in claims[1:]), (which, claims)
    chosen = choose_formats(template, tokens)
    assert chosen.tool_calls is not None
    assert chosen.tool_calls.name == family


def test_every_family_has_a_template() -> None:
    ours = {family for family, _, _ in FORMATS.values()}
    assert {family for family, *_ in TEMPLATES} == ours - _WITHOUT_TEMPLATE


@pytest.mark.parametrize("family", sorted(_WITHOUT_TEMPLATE))
def test_a_family_without_a_template_is_found_by_its_name(family: str) -> None:
    """No template is taken for it, and the config can name it, with its reasoning."""
    assert not any(find_tool_call_family(family).detect(line[2], frozenset(line[3])) for line in TEMPLATES)
    chosen = choose_formats(None, (), tools=family, reasoning=family)
    assert chosen.tool_calls is find_tool_call_family(family)
    assert chosen.reasoning is find_reasoning_family(family)


def test_every_family_has_a_corpus() -> None:
    """A family without cases, or without a call that streams, would be tested by nothing."""
    oldest = {case.family for case in core.CASES}  # whose well-formed calls are there
    formats = {family for family, _, _ in FORMATS.values()}
    assert {family.name for family in TOOL_CALL_FAMILIES} - oldest - formats == set(), "add a line to FORMATS"
    tested = {case.family for case in [*core.CASES, *malformed.CASES, *well_formed.CASES]}
    assert {family.name for family in TOOL_CALL_FAMILIES} - tested == set()
    assert {family for family, _, _ in FORMATS.values()} - set(STREAMED) == set()


def test_another_template_belongs_to_no_family() -> None:
    """The counterpart: what these families are recognised by is not in every template."""
    chatml = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"
    ours = {family for family, _, _ in FORMATS.values()}
    assert not [
        f.name for f in TOOL_CALL_FAMILIES if f.name in ours and f.detect(chatml, frozenset(("<|im_end|>",)))
    ]


def test_harmony_reads_calls_and_reasoning() -> None:
    """`auto` finds it twice, and reasoning needs no other parser, with tools or without."""
    _, _, template, tokens = next(line for line in TEMPLATES if line[0] == "harmony")
    chosen = choose_formats(template, tokens)
    assert chosen.tool_calls is not None and chosen.reasoning is not None
    assert chosen.tool_calls.read_answer is chosen.reasoning.read_answer is not None
    for tools in (TOOLS, None):
        answer = AnswerParser(chosen.tool_calls, chosen.reasoning, tools)
        found = [*answer.feed("<|channel|>analysis<|message|>hm<|end|><|start|>assistant"), *answer.finish()]
        assert [(d.kind, d.text) for d in found] == [("reasoning", "hm")]


def test_harmony_without_a_reasoning_parser_is_all_content() -> None:
    """Where the config says `reasoning: none`, the analysis is content, and nothing is lost."""
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>x"
    answer = make_tool_call_parser("harmony")
    assert "".join(d.text for d in [*answer.feed(text), *answer.finish()] if d.kind == "content") == "hm\nx"


def _ids(family: str, text: str) -> list[str]:
    one = make_tool_call_parser(family, new_id=lambda: "new")
    return [delta.id for delta in [*one.feed(text), *one.finish()] if delta.id]


def test_ids_of_the_model_are_used() -> None:
    """Kimi's and Mistral's templates show ids to the model, which wrote them; none is given twice."""
    call = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert _ids("kimi_k2", call.format(3) + call.format(4)) == ["functions.now:3", "functions.now:4"]
    assert _ids("kimi_k2", call.format(3) + call.format(3)) == ["functions.now:3", "new"]
    assert _ids("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}") == ["abc123XYZ"]
    assert _ids("mistral", "[TOOL_CALLS]now[ARGS]{}") == ["new"]


# Of a call so much that the beginning of a string is certain, and for Python a whole one.
STREAMED = {
    "llama": '{"name": "get_weather", "parameters": {"city": "Par',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
    "mistral_v3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Par',
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Par',
    "deepseek_v31": '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Par',
    "deepseek_v32": '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Par',
    "glm": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par",
    "longcat": '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Par',
    "kimi_k2": '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Par',
    "minimax_m2": '<invoke name="get_weather"><parameter name="city">Par',
    "harmony": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Par',
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Par",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Par',
    "phi4_mini": 'functools[{"name": "get_weather", "arguments": {"city": "Par',
    "xlam": '[{"name": "get_weather", "arguments": {"city": "Par',
    "step": "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
    "pythonic": "[get_weather(city='Paris', unit='c",
    "deepseek_v4": '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Par',
    "deepseek_v41": '<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" string="true">Par',
    "kimi_k3": '<|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Par',
    "minimax_m3": ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Par',
    "minicpm5": '<function name="get_weather"><param name="city">Par',
    "jamba": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Par',
    "hunyuan_a13b": '<tool_calls><tool_call>get_weather\n```json\n{"city": "Par',
    "hunyuan_v3": "<tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Par",
    "ling3": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
    "ernie45": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
    "olmo3": "<function_calls>get_weather(city='Paris', unit='c",
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "Par',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Par',
    "plamo3": "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>get_weather"
    '<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:msg|>{"city": "Par',
    "cohere": '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Par',
    "command_r": 'Action:\n```json\n[{"tool_name": "get_weather", "parameters": {"city": "Par',
    "functionary": 'get_weather\n{"city": "Par',
    "functionary_v2": 'get_weather\n<|content|>{"city": "Par',
    "functionary_v25": '<|reserved_special_token_249|>get_weather\n{"city": "Par',
    "functionary_v31": '<function=get_weather>{"city": "Par',
    "gigachat3": 'function call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Par',
    "gigachat31": '<|function_call|>{"name": "get_weather", "arguments": {"city": "Par',
    "gigachat35": '<｜GCML｜invoke name="get_weather">\n<｜GCML｜parameter name="city" string="true">Par',
    "ui_tars": "Action: get_weather(city='Paris', unit='c",
    "muse": ' to=f<|message|><atem:invoke name="get_weather">\n<atem:parameter name="city">Par',
}
_BY_VALUE = {"pythonic", "olmo3", "ui_tars"}  # whose values are passed on when they are complete


@pytest.mark.parametrize("family", STREAMED)
def test_arguments_come_as_soon_as_they_are_certain(family: str) -> None:
    """Long before the call ends its name and the beginning of a string are out."""
    text = STREAMED[family]
    arguments = '{"city": "Paris"' if family in _BY_VALUE else '{"city": "Par'
    one = make_tool_call_parser(family)
    found = [delta for char in text for delta in one.feed(char)]
    assert [delta.name for delta in found if delta.name] == ["get_weather"]
    assert "".join(delta.text for delta in found) == arguments


@pytest.mark.parametrize("family", sorted(STREAMED))
def test_plain_text_wakes_no_reader(family: str) -> None:
    """10,000 plain tokens, and the readers sleep through all but the first few."""
    answer = make_tool_call_parser(family)
    found: list[Delta] = []
    for _ in range(10_000):
        found += answer.feed("word")
    assert "".join(delta.text for delta in found) == "word" * 10_000
    assert answer.reads <= 4


def _read_call_around(family: str) -> Sequence[object]:
    around = find_tool_call_family(family).get_call_prefix_suffix(FIRST[0])
    assert around is not None
    before, after = around
    text = f"{before}{json.dumps(FIRST[1])}{after}"
    return run_parser(lambda: make_parser(Case("around", family, text, [])), [text])


@pytest.mark.parametrize(
    "family", sorted({f.name for f in TOOL_CALL_FAMILIES if f.call and f.name in STREAMED})
)
def test_text_around_arguments_makes_a_call(family: str) -> None:
    """The parser reads what a grammar for `tool_choice: required` is built from."""
    assert _read_call_around(family) == [Call(*FIRST)]


def test_formats_without_json_have_no_text_around_arguments() -> None:
    without = {f.name for f in TOOL_CALL_FAMILIES if f.name in STREAMED and not f.call}
    tagged = {"glm", "longcat", "minimax_m2", "gemma4", "function_gemma", "step", "pythonic"}
    assert without == tagged | {"minimax_m3", "minicpm5", "hunyuan_v3", "ling3", "olmo3", "muse"}
