"""What models write beside their format, and what is read all the same. One line a case.

Calls in reasoning that was not closed, end tags within values, calls in the syntax of another format or without their
markers, tags too many, and arguments in another syntax.
"""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.parser_corpus import call_formats as forms
from tests.helpers.parser_corpus.core import coder, flat, hermes, seed
from tests.helpers.parser_corpus.writing import dump
from tests.helpers.parser_driver import TOOLS, Call, Case, Item, Reasoning, make_tool

Line = tuple[str, str, str, list[Item]]  # family, what, text, items
Write = Callable[[str, dict[str, Any]], str]

W, NOW = "get_weather", Call("now", {})
A, B = Call(W, {"city": "A"}), Call(W, {"city": "B"})
ONE: dict[str, Any] = {"city": "A"}
TWO: dict[str, Any] = {"city": "B"}
HM = Reasoning("hm")

# -- calls in reasoning that ends with the answer -------------------------------------------------------

# Families whose openers are plain text: reasoning may mention them, so a call counts only at its end.
UNCLOSED: list[tuple[str, str, str, str, Write]] = [
    ("hermes", "think", "<think>", "</think>", hermes),
    ("qwen3_coder", "think", "<think>", "</think>", coder),
    ("seed_oss", "seed_oss", "<seed:think>", "</seed:think>", seed),
    ("minimax_m2", "think", "<think>", "</think>", forms.minimax),
    ("step", "think", "<think>", "</think>", forms.step),
    ("granite", "granite3_3", "<think>", "</think>", forms.granite_plain),
    ("phi4_mini", "think", "<think>", "</think>", forms.phi),
    ("llama", "think", "<think>", "</think>", forms.llama_function),
    ("pythonic", "think", "<think>", "</think>", forms.lfm2),
]  # fmt: skip


def _make_unclosed(family: str, reasoning: str, a: str, b: str, write: Write) -> list[Case]:
    one, two, none = write(W, ONE), write(W, TWO), write("rm", {"path": "/"})
    cut, begun = one[: one.index("A")].rstrip(), one[:12].rstrip()

    def case(what: str, text: str, want: list[Item], opened: bool = False) -> Case:
        return Case(f"{family}: {what}", family, text, want, reasoning=reasoning, opened=opened)

    return [
        case("a call in reasoning that is not closed", f"{a}hm\n{one}", [Reasoning(f"hm\n{one}"), A]),
        case("the same, opened by the prompt", f"hm\n{one}\n", [Reasoning(f"hm\n{one}"), A], opened=True),
        case("two calls in reasoning that is not closed", f"{a}{one}\n{two}", [Reasoning(f"{one}\n{two}"), A, B]),
        case("a call in reasoning that goes on", f"{a}hm {one} or so", [Reasoning(f"hm {one} or so"), A]),
        case("a call in reasoning, and one that is cut off", f"{a}{one}\n{cut}", [Reasoning(f"{one}\n{cut}"), A]),
        case("a call in reasoning that is cut off", f"{a}hm {cut}", [Reasoning(f"hm {cut}")]),
        case("a call to no one in reasoning that is not closed", f"{a}hm {none}", [Reasoning(f"hm {none}")]),
        case("an opener in reasoning that is not closed", f"{a}hm {begun}", [Reasoning(f"hm {begun}")]),
        case("reasoning that is closed behind a call", f"{a}hm\n{one}\n{b}\n", [Reasoning(f"hm\n{one}"), A]),
        case("reasoning that is closed behind a call, and an answer", f"{a}hm {one}{b}Yes.", [Reasoning(f"hm {one}"), "Yes."]),
        case("reasoning that is closed behind a call, and the call", f"{a}hm {one}{b}{two}", [Reasoning(f"hm {one}"), B]),
        case("reasoning that is closed behind words on a call", f"{a}hm {one}?{b}", [Reasoning(f"hm {one}?")]),
        case("reasoning twice, the last with a call", f"{a}hm {two}{b}{one}{a}so {two}", [Reasoning(f"hm {two}"), A, Reasoning(f"so {two}"), B]),
    ]  # fmt: skip


# -- a literal end tag in a value ------------------------------------------------------------------------

TAGGED: list[tuple[str, str, str, Write]] = [
    ("coder", "qwen3_coder", "</parameter>", coder),
    ("coder in Hermes", "hermes", "</parameter>", coder),
    ("seed", "seed_oss", "</parameter>", seed),
    ("seed flat", "seed_oss", "</parameter>", flat),
    ("step", "step", "</parameter>", forms.step),
    ("step3", "step", "</steptml:parameter>", forms.step3),
    ("minimax", "minimax_m2", "</parameter>", forms.minimax),
    ("deepseek v32", "deepseek_v32", "</｜DSML｜parameter>", forms.deepseek_v32),
    ("glm45", "glm", "</arg_value>", forms.glm45),
    ("glm47", "glm", "</arg_value>", forms.glm47),
    ("longcat", "longcat", "</longcat_arg_value>", forms.longcat),
]  # fmt: skip


def _make_tagged(form: str, family: str, end: str, write: Write) -> list[Case]:
    values: list[tuple[str, dict[str, Any]]] = [
        ("in a string", {"path": "p", "content": f"a {end} b"}),
        ("at the beginning of a string", {"content": f"{end}b", "path": "p"}),
        ("at the end of a string", {"path": f"a{end}", "content": "b"}),
        ("on a line of a string", {"path": f"x\n{end}\ny", "tags": ["a"]}),
        ("twice in a string", {"content": f"<x>{end}{end}</x>{end}."}),
        ("in an array", {"tags": [f"a {end} b", end], "path": "p"}),
        ("in an object", {"meta": {"a": f"{end}, {end}"}}),
    ]  # fmt: skip
    return [
        Case(
            f"{form}: an end tag {where}",
            family,
            f"So: {write('write_file', value)} ok",
            ["So:", Call("write_file", value), "ok"],
        )
        for where, value in values
    ]


# -- the syntax of another format, or none ----------------------------------------------------------------

F = '{"name": "get_weather", "arguments": {"city": "A"}}'
G = '{"name": "now", "arguments": {}}'
P = '{"name": "get_weather", "parameters": {"city": "A"}}'
RM = '{"name": "rm", "arguments": {"path": "/"}}'
FN = '<function=get_weather>{"city": "A"}</function>'


def _make_functions(family: str) -> list[Line]:
    """JSON in the XML of a function."""
    return [
        (family, "JSON in a function", FN, [A]),
        (family, "JSON in two functions", f"{FN}\n{FN}", [A, A]),
        (family, "JSON in a function behind prose", f"So: {FN}\nok", ["So:", A, "ok"]),
    ]


def _make_bare(family: str) -> list[Line]:
    """JSON without its tags, of the families that write tags around JSON or XML."""
    return [
        (family, "bare JSON", F, [A]),
        (
            family,
            "bare JSON on lines",
            '{\n  "name": "get_weather",\n  "arguments": {\n    "city": "A"\n  }\n}',
            [A],
        ),
        (family, "bare JSON with parameters", P, [A]),
        (family, "bare JSON, type first", f'{{"type": "function", {F[1:]}', [A]),
        (family, "bare JSON, arguments first", '{"arguments": {"city": "A"}, "name": "get_weather"}', [A]),
        (family, "bare JSON of OpenAI's format", f'{{"type": "function", "function": {F}}}', [A]),
        (family, "bare JSON, two objects", f"{F}\n{G}", [A, NOW]),
        (family, "a bare array", f"[{F}, {G}]", [A, NOW]),
        (family, "JSON in a fence", f"```json\n{F}\n```", [A]),
        (family, "JSON in a bare fence", f"```\n{F}\n```", [A]),
        (family, "an array in a fence", f"```json\n[{F}, {G}]\n```\n", [A, NOW]),
        (family, "bare JSON behind prose", f"I look.\n{F}", ["I look.", A]),
        (family, "JSON in a fence behind prose", f"I look:\n\n```json\n{F}\n```\nDone.", ["I look:", A, "Done."]),
        (family, "bare JSON to no one", RM, [RM]),
        (family, "JSON to no one in a fence", f"```json\n{RM}\n```", [f"```json\n{RM}\n```"]),
        (family, "bare JSON without arguments", '{"name": "now"}', ['{"name": "now"}']),
        (family, "a definition of a tool", '{"name": "now", "description": "x"}', ['{"name": "now", "description": "x"}']),
        (family, "other JSON", '{"type": "object", "name": "now"}', ['{"type": "object", "name": "now"}']),
        (family, "other JSON in a fence", '```json\n{"a": [{}, {"b": 1}]}\n```', ['```json\n{"a": [{}, {"b": 1}]}\n```']),
        (family, "code in a fence", "```python\nx = {}\n```", ["```python\nx = {}\n```"]),
        (family, "bare JSON, cut in a string", '{"name": "get_weather", "arguments": {"city": "Pa', [Call(W, {"city": "Pa"})]),
        (family, "bare JSON, cut in the name", '{"name": "get_we', ['{"name": "get_we']),
    ]  # fmt: skip


OTHER_SYNTAX: list[Line] = [
    *(line for family in ("hermes", "qwen3_coder", "step", "seed_oss", "granite", "phi4_mini") for line in _make_bare(family)),
    *(line for line in _make_bare("llama") if line[1] not in ("bare JSON without arguments", "a definition of a tool", "other JSON")),
    ("hermes", "JSON within a line", f"Write {F} to call.", [f"Write {F} to call."]),
    ("llama", "JSON within a line", f"I call {P} now.", ["I call", A, "now."]),
    ("llama", "JSON to no one within a line", f"I call {RM} now.", [f"I call {RM} now."]),
    ("llama", "braces in prose", "Sets {a, b} and {c: {d}}.", ["Sets {a, b} and {c: {d}}."]),
    *(line for family in ("hermes", "qwen3_coder", "step", "seed_oss", "llama") for line in _make_functions(family)),
    ("hermes", "JSON in a function in the tags", f"<tool_call>\n{FN}\n</tool_call>", [A]),
    ("qwen3_coder", "JSON in a function in the tags", f"Sure.<tool_call>{FN}</tool_call>", ["Sure.", A]),
    ("qwen3_coder", "JSON in a function, on lines", '<tool_call>\n<function=get_weather>\n{\n"city": "A"\n}\n</function>\n</tool_call>', [A]),
    ("qwen3_coder", "JSON in a function, cut", '<function=get_weather>{"city": "Pa', [Call(W, {"city": "Pa"})]),
    ("qwen3_coder", "JSON in a function to no one", '<function=rm>{"f": 1}</function>', ['<function=rm>{"f": 1}</function>']),
    ("seed_oss", "JSON in a function in the tags", f"<seed:tool_call>{FN}</seed:tool_call>", [A]),
    ("seed_oss", "JSON in the tags", f"<seed:tool_call>\n{F}\n</seed:tool_call>", [A]),
    ("qwen3_coder", "no end of any value", "<function=get_weather>\n<parameter=city>A\n<parameter=unit>celsius\n<parameter=days>3\n</function>", [Call(W, {"city": "A", "unit": "celsius", "days": 3})]),
    ("qwen3_coder", "both quotes in an array", "<function=write_file><parameter=tags>\n[\"a\", 'b']\n</parameter></function>", [Call("write_file", {"tags": ["a", "b"]})]),
    ("qwen3_coder", "no end of the function", "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n</parameter>\n</tool_call>", [A]),
    ("qwen3_coder", "no end of the function, then another", f"<tool_call>\n<function=get_weather>\n<parameter=city>\nB\n</parameter>\n{coder(W, ONE)}", [B, A]),
    ("seed_oss", "no end of the function", "<seed:tool_call><function=get_weather><parameter=city>A</parameter></seed:tool_call>", [A]),
    ("seed_oss", "a newline at the end of a value alone", "<function=write_file><parameter=content>a\n</parameter></function>", [Call("write_file", {"content": "a\n"})]),
]  # fmt: skip

# -- tags too many -----------------------------------------------------------------------------------------


def _make_doubled(family: str, start: str, end: str, write: Write) -> list[Line]:
    one = write(W, ONE)
    return [
        (family, "an end too many", f"{one}{end}", [A]),
        (family, "an end too many, and text", f"Hi.\n{one}\n{end}\n{end}\nYes.", ["Hi.", A, "Yes."]),
        (family, "the opener twice", f"Hi. {start}{one}", ["Hi.", A]),
        (family, "the opener twice, on lines", f"{start}\n{one}\n{end}", [A]),
    ]


TAGS_TOO_MANY: list[Line] = [
    *_make_doubled("hermes", "<tool_call>", "</tool_call>", hermes),
    *_make_doubled("qwen3_coder", "<tool_call>", "</tool_call>", coder),
    *_make_doubled("step", "<tool_call>", "</tool_call>", forms.step),
    *_make_doubled("seed_oss", "<seed:tool_call>", "</seed:tool_call>", seed),
    *_make_doubled("glm", "<tool_call>", "</tool_call>", forms.glm45),
    *_make_doubled("granite", "<tool_call>", "</tool_call>", forms.granite4),
    *_make_doubled("mistral_v3", "[TOOL_CALLS]", "", forms.mistral_old)[2:],
    *_make_doubled("mistral", "[TOOL_CALLS]", "", forms.mistral)[2:],
    *_make_doubled("gemma4", "<|tool_call>", "<tool_call|>", forms.gemma4),
    *_make_doubled("pythonic", "<|tool_call_start|>", "<|tool_call_end|>", forms.lfm2),
    ("hermes", "an empty block", "<tool_call></tool_call>", []),
    ("hermes", "an empty block behind text", "Hi.\n<tool_call>\n</tool_call>\n", ["Hi."]),
    ("hermes", "an empty block, then a call", f"<tool_call>\n</tool_call>\n{hermes(W, ONE)}", [A]),
    ("hermes", "a call, then an empty block", f"{hermes(W, ONE)}\n<tool_call></tool_call>", [A]),
    ("hermes", "an empty block in a sentence", "Between `<tool_call></tool_call>` tags", ["Between `<tool_call></tool_call>` tags"]),
    ("qwen3_coder", "an empty block behind text", "Hi.\n<tool_call></tool_call>", ["Hi."]),
    ("seed_oss", "an empty block", "Hi.\n<seed:tool_call>\n</seed:tool_call>", ["Hi."]),
    ("glm", "an empty block behind text", "Hi.\n<tool_call>\n</tool_call>", ["Hi."]),
    ("granite", "an empty block", "<tool_call></tool_call>Hi.", ["Hi."]),
    ("hermes", "an end of a function too many", f"<tool_call>{F}</function></tool_call>", [A]),
    ("llama", "an end of a tag too many", f"<|python_tag|>{F}<|eom_id|><|eom_id|>", [A]),
    ("minimax_m2", "an end too many", f"{forms.minimax(W, ONE)}</invoke></minimax:tool_call>", [A]),
    ("deepseek_v32", "an end too many", f"{forms.deepseek_v32(W, ONE)}</｜DSML｜invoke>", [A]),
    ("deepseek_v31", "an end too many", forms.deepseek_v31(W, ONE).replace("<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>" * 2), [A]),
    ("kimi_k2", "an end too many", forms.kimi(W, ONE).replace("<|tool_call_end|>", "<|tool_call_end|>" * 2), [A]),
    ("gemma4", "a turn's end for the call's", '<|tool_call>call:get_weather{city:<|"|>A<|"|>}<turn|>', [A]),
    ("hermes", "names with spaces", '<tool_call>{"name": " get_weather ", "arguments": {"city": "A"}}</tool_call>', [A]),
    ("qwen3_coder", "names with spaces", "<function= get_weather ><parameter= city >A</parameter></function>", [A]),
    ("kimi_k2", "names with spaces", '<|tool_call_begin|> functions.get_weather:0 <|tool_call_argument_begin|>{"city": "A"}<|tool_call_end|>', [A]),
    ("llama", "names with spaces", '{"name": "get_weather ", "parameters": {"city": "A"}}', [A]),
    ("minimax_m2", "names with spaces", '<invoke name=" get_weather "><parameter name="city">A</parameter></invoke>', [A]),
    ("mistral", "names with spaces", '[TOOL_CALLS] get_weather {"city": "A"}', [A]),
    ("glm", "names with spaces", "<tool_call> get_weather <arg_key> city </arg_key><arg_value>A</arg_value></tool_call>", [A]),
]  # fmt: skip

# -- arguments in another syntax ------------------------------------------------------------------------------

Q = '<|"|>'
DSML = '<｜DSML｜invoke name="{}"{}'
DSML_END = "</｜DSML｜invoke>"


def _dsml(key: str, value: str, string: str = "false") -> str:
    return f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>'


ARGUMENTS: list[Line] = [
    ("deepseek_v32", "a body of JSON", DSML.format(W, f">{dump(ONE)}{DSML_END}"), [A]),
    ("deepseek_v32", "a body of JSON on lines", "<｜DSML｜function_calls>\n" + DSML.format(W, f'>\n{{\n "city": "A"\n}}\n{DSML_END}') + "\n</｜DSML｜function_calls>", [A]),
    ("deepseek_v32", "a body that is empty JSON", DSML.format("now", f">{{}}{DSML_END}"), [NOW]),
    ("deepseek_v32", "a call that closes itself", DSML.format("now", "/>"), [NOW]),
    ("deepseek_v32", "a call that closes itself, with a space", DSML.format("now", " />\n") + forms.deepseek_v32(W, ONE), [NOW, A]),
    ("deepseek_v32", "arguments as one parameter", DSML.format(W, f">{_dsml('arguments', dump(ONE))}{DSML_END}"), [A]),
    ("deepseek_v32", "input as one parameter", DSML.format(W, f">\n{_dsml('input', dump(ONE), 'true')}\n{DSML_END}"), [A]),
    ("deepseek_v32", "arguments of a tool that has them", DSML.format("run", f">{_dsml('input', dump(ONE))}{DSML_END}"), [Call("run", {"input": ONE})]),
    ("deepseek_v32", "arguments beside another parameter", DSML.format("book", f">{_dsml('input', '1')}{_dsml('free', '2')}{DSML_END}"), [Call("book", {"input": 1, "free": 2})]),
    ("deepseek_v32", "arguments that are no object", DSML.format("book", f">{_dsml('arguments', '[1]')}{DSML_END}"), [Call("book", {"arguments": [1]})]),
    ("minimax_m2", "a body of JSON", '<minimax:tool_call><invoke name="get_weather">{"city": "A"}</invoke></minimax:tool_call>', [A]),
    ("minimax_m2", "a call that closes itself", '<minimax:tool_call>\n<invoke name="now"/>\n</minimax:tool_call>', [NOW]),
    ("minimax_m2", "arguments as one parameter", f'<invoke name="get_weather"><parameter name="arguments">{dump(ONE)}</parameter></invoke>', [A]),
    ("minimax_m2", "no end of the call", '<minimax:tool_call><invoke name="get_weather"><parameter name="city">A</parameter></minimax:tool_call>', [A]),
    ("pythonic", "a dictionary of all arguments", "[get_weather({'city': 'A'})]", [A]),
    ("pythonic", "a dictionary of all arguments, in JSON", '<|tool_call_start|>[get_weather({"city": "A", "detail": true})]<|tool_call_end|>', [Call(W, {"city": "A", "detail": True})]),
    ("pythonic", "a dictionary that is the first argument", "[note({'a': 1})]", [Call("note", {"data": {"a": 1}})]),
    ("pythonic", "a list behind prose", "I look.\n[get_weather(city='A'), now()]\nDone.", ["I look.", A, NOW, "Done."]),
    ("pythonic", "a list to no one behind prose", "I look.\n[rm(f='/')]", ["I look.\n[rm(f='/')]"]),
    ("pythonic", "a list within a line", "Write [now()] so.", ["Write [now()] so."]),
    ("pythonic", "links and notes", "See\n[now](x)\n[1] and [now", ["See\n[now](x)\n[1] and [now"]),
    ("pythonic", "quotes within quotes", "[write_file(path='p', content='sed -n '1,5p' a.py')]", [Call("write_file", {"path": "p", "content": "sed -n '1,5p' a.py"})]),
    ("pythonic", "double quotes within quotes", '[get_weather(city="He said "hi", and left")]', [Call(W, {"city": 'He said "hi", and left'})]),
    ("pythonic", "quotes within quotes, and brackets", "[write_file(content='python -c \"f(x='\\,')\"')]", [Call("write_file", {"content": "python -c \"f(x='\\,')\""})]),
    ("pythonic", "quotes within quotes in a list", "[write_file(tags=['it's', 'b'])]", [Call("write_file", {"tags": ["it's", "b"]})]),
    ("pythonic", "quotes and another argument", "[get_weather(city='A', unit='celsius')]", [Call(W, {"city": "A", "unit": "celsius"})]),
    ("pythonic", "a set for an array", "[write_file(tags={'a', 'b'})]", [Call("write_file", {"tags": ["a", "b"]})]),
    ("glm", "an escaped array", '<tool_call>write_file<arg_key>tags</arg_key><arg_value>[\\"a\\", \\"b\\"]</arg_value></tool_call>', [Call("write_file", {"tags": ["a", "b"]})]),
    ("glm", "an escaped object", '<tool_call>write_file<arg_key>meta</arg_key><arg_value>{\\"a\\": [1]}</arg_value></tool_call>', [Call("write_file", {"meta": {"a": [1]}})]),
    ("glm", "an array twice encoded", '<tool_call>write_file<arg_key>tags</arg_key><arg_value>"[\\"a\\"]"</arg_value></tool_call>', [Call("write_file", {"tags": ["a"]})]),
    ("qwen3_coder", "an escaped array", '<function=write_file><parameter=tags>[\\"a\\"]</parameter></function>', [Call("write_file", {"tags": ["a"]})]),
    ("mistral", "no arguments", "[TOOL_CALLS]now", [NOW]),
    ("mistral", "no arguments, then another", f"[TOOL_CALLS]now[TOOL_CALLS]get_weather[ARGS]{dump(ONE)}", [NOW, A]),
    ("mistral", "no arguments, with the marker, then another", f"[TOOL_CALLS]now[ARGS][TOOL_CALLS]get_weather[ARGS]{dump(ONE)}", [NOW, A]),
    ("mistral", "no arguments of a tool that has some", "[TOOL_CALLS]get_weather[ARGS]", ["[TOOL_CALLS]get_weather[ARGS]"]),
    ("mistral", "null arguments", '[TOOL_CALLS]now[ARGS]"{}"', [NOW]),
    ("gemma4", "two calls in a block", f"<|tool_call>call:get_weather{{city:{Q}A{Q}}}call:now{{}}<tool_call|>", [A, NOW]),
    ("gemma4", "two calls in a block with a comma", f"<|tool_call>call:get_weather{{city:{Q}A{Q}}}, call:now{{}}<tool_call|>", [A, NOW]),
    ("gemma4", "two calls in a block on lines", f"<|tool_call>\ncall:get_weather{{city:{Q}A{Q}}}\ncall:now{{}}\n<tool_call|>ok", [A, NOW, "ok"]),
    ("gemma4", "parentheses", f"<|tool_call>call:get_weather(city:{Q}A{Q},days:3)<tool_call|>", [Call(W, {"city": "A", "days": 3})]),
    ("gemma4", "parentheses and equals signs", '<|tool_call>call:get_weather(city="A", days=3)<tool_call|>', [Call(W, {"city": "A", "days": 3})]),
    ("gemma4", "braces and equals signs", '<|tool_call>call:get_weather{city="A", detail=true}<tool_call|>', [Call(W, {"city": "A", "detail": True})]),
    ("gemma4", "empty parentheses", "<|tool_call>call:now()<tool_call|>", [NOW]),
    ("gemma4", "JSON in parentheses", f"<|tool_call>call:get_weather({dump(ONE)})<tool_call|>", [A]),
    ("gemma4", "single quotes", "<|tool_call>call:get_weather{city:'A', unit:'celsius'}<tool_call|>", [Call(W, {"city": "A", "unit": "celsius"})]),
    ("gemma4", "quotes within single quotes", "<|tool_call>call:get_weather{city:'it's \\'so\\' \\d, or'}<tool_call|>", [Call(W, {"city": "it's 'so' \\d, or"})]),
    ("gemma4", "keys in single quotes", "<|tool_call>call:get_weather{'city':'A'}<tool_call|>", [A]),
    ("gemma4", "a number in single quotes", "<|tool_call>call:add{a:'3.0'}<tool_call|>", [Call("add", {"a": 3.0})]),
    ("gemma4", "an array in parentheses", "<|tool_call>call:write_file(tags=['a', \"b\"], mode=3)<tool_call|>", [Call("write_file", {"tags": ["a", "b"], "mode": 3})]),
    ("gemma4", "a quote missing before a string", f"<|tool_call>call:get_weather{{city:New York{Q},days:3}}<tool_call|>", [Call(W, {"city": "New York", "days": 3})]),
    ("gemma4", "a quote missing in an array", f"<|tool_call>call:write_file{{tags:[{Q}a{Q},b{Q}]}}<tool_call|>", [Call("write_file", {"tags": ["a", "b"]})]),
    ("gemma4", "a colon for the word", f"<|tool_call>:get_weather{{city:{Q}A{Q}}}<tool_call|>", [A]),
    ("gemma4", "a colon before the word", f"<|tool_call>:call:get_weather{{city:{Q}A{Q}}}<tool_call|>", [A]),
    ("gemma4", "no token", f"call:get_weather{{city:{Q}A{Q}}}", [A]),
    ("gemma4", "no token and no word", f"get_weather{{city:{Q}A{Q}}}", [A]),
    ("gemma4", "no token behind a line", f"I look.\ncall:get_weather{{city:{Q}A{Q}}}\ncall:now{{}}", ["I look.", A, NOW]),
    ("gemma4", "no token, with an end", f"call:get_weather{{city:{Q}A{Q}}}<tool_call|>", [A]),
    ("gemma4", "a broken token", f"<call>get_weather{{city:{Q}A{Q}}}", [A]),
    ("gemma4", "no token, to no one", "call:rm{f:1}", ["call:rm{f:1}"]),
    ("gemma4", "the word in a sentence", "Like call: now, or\ncall: me", ["Like call: now, or\ncall: me"]),
    ("gemma4", "code", "```tool_code\nget_weather(city='A')\n```", [A]),
    ("gemma4", "code that prints", 'So:\n```tool_code\nprint(get_weather(city="A"))\nnow()\n```\n', ["So:", A, NOW]),
    ("gemma4", "code with a list", "```tool_code\n[get_weather(city='A'), now()]\n```", [A, NOW]),
    ("gemma4", "code to no one", "```tool_code\nrm('/')\n```", ["```tool_code\nrm('/')\n```"]),
    ("gemma4", "cut in parentheses", '<|tool_call>call:get_weather(city="Pa', [Call(W, {"city": "Pa"})]),
    ("gemma4", "cut in single quotes", "<|tool_call>call:add{a:1, b:'2", [Call("add", {"a": 1})]),
    ("function_gemma", "two calls in a block", "<start_function_call>call:now{}call:now{}<end_function_call>", [NOW, NOW]),
    ("harmony", "a message to the assistant", "<|channel|>commentary to=assistant<|message|>Yes.<|end|>", ["Yes."]),
]  # fmt: skip

# -- tags of reasoning ------------------------------------------------------------------------------------------

# family, reasoning, what, whether the prompt opened it, text, items
TAGS: list[tuple[str | None, str, str, bool, str, list[Item]]] = [
    (None, "think", "an end at the start", False, "</think>\n\nYes.", ["Yes."]),
    (None, "think", "the end twice", False, "<think>hm</think></think>Yes.", [HM, "Yes."]),
    (None, "think", "the end twice, on lines", True, "hm\n</think>\n</think>\n\nYes.", [HM, "Yes."]),
    (None, "think", "an end on a line", False, "<think>hm</think>Yes.\n</think>\nNo.", [HM, "Yes.\nNo."]),
    (None, "think", "an end between sentences", True, "hm</think>Yes.</think>No.", [HM, "Yes.\nNo."]),
    (None, "think", "an end at the end", True, "hm</think>Yes.</think>", [HM, "Yes."]),
    (None, "think", "the opener twice", False, "<think>\n<think>\nhm</think>Yes.", [HM, "Yes."]),
    (None, "think", "the opener twice, and the end", False, "<think><think>hm</think></think>Yes.", [HM, "Yes."]),
    (None, "think", "reasoning in reasoning", False, "<think>a <think>b</think></think>Yes.", [Reasoning("a <think>b"), "Yes."]),
    (None, "think", "tags that are mentioned", True, "hm</think>Write `<think>` and `</think>`.", [HM, "Write `<think>` and `</think>`."]),
    (None, "think", "tags that are quoted", True, "hm</think>So:\n<think>\nx\n</think>\nok", [HM, "So:\n<think>\nx\n</think>\nok"]),
    (None, "think", "an end that is mentioned", True, "hm</think>It is </think>, I say.", [HM, "It is </think>, I say."]),
    (None, "seed_oss", "the end twice", False, "<seed:think>hm</seed:think>\n</seed:think>Yes.", [HM, "Yes."]),
    (None, "mistral", "the end twice", False, "[THINK]hm[/THINK][/THINK]Yes.", [HM, "Yes."]),
    (None, "gemma4", "no label", False, "<|channel>hm<channel|>Yes.", [HM, "Yes."]),
    (None, "gemma4", "the opener twice", False, "<|channel><|channel>thought\nhm<channel|>Yes.", [HM, "Yes."]),
    (None, "gemma4", "a channel of content", False, "<|channel>thought\nhm<channel|><|channel>content\nYes.<channel|>", [HM, "Yes."]),
    (None, "gemma4", "a channel of a response", False, "<|channel>thought\nhm<channel|><|channel>response\nYes.<channel|>", [HM, "Yes."]),
    (None, "gemma4", "a channel that ends another", False, "<|channel>thought hm<|channel>response Yes.", [HM, "Yes."]),
    (None, "gemma4", "a channel of content alone", False, "<|channel>content\nYes.<channel|>", ["Yes."]),
    ("gemma4", "gemma4", "a call without its token", False, f"<|channel>thought\nhm<channel|>call:get_weather{{city:{Q}A{Q}}}", [HM, A]),
    ("glm", "think", "a late end", True, f"hm{forms.glm47(W, ONE)}</think>", [HM, A]),
    ("glm", "think", "a late end, and text", True, f"hm\n{forms.glm45(W, ONE)}\n</think>\n\nYes.", [HM, A, "Yes."]),
    ("kimi_k2", "think", "a late end", False, f"<think>hm{forms.kimi(W, ONE)}</think>", [HM, A]),
    ("deepseek_v31", "think", "a late end", True, f"hm{forms.deepseek_v31(W, ONE)}</think>", [HM, A]),
    ("deepseek_v32", "think", "a late end", True, f"hm\n{forms.deepseek_v32(W, ONE)}\n</think>", [HM, A]),
    ("mistral", "mistral", "a late end", False, f"[THINK]hm{forms.mistral(W, ONE)}[/THINK]", [HM, A]),
    ("hermes", "think", "an end behind a call", True, f"hm</think>{hermes(W, ONE)}</think>", [HM, A]),
    ("qwen3_coder", "think", "an end before a call", False, f"</think>\n{coder(W, ONE)}", [A]),
    ("minimax_m2", "think", "an end behind a call", True, f"hm</think>{forms.minimax(W, ONE)}\n</think>\n", [HM, A]),
]  # fmt: skip

# -- text around calls ------------------------------------------------------------------------------------------

AROUND: list[Line] = [
    ("hermes", "a line between two texts", f"Before.\n\n{hermes(W, ONE)}\n\nAfter.\n{hermes('now', {})} End.", ["Before.", A, "After.", NOW, "End."]),
    ("kimi_k2", "a line between two texts", f"Before.{forms.kimi(W, ONE)}After.", ["Before.", A, "After."]),
    ("minimax_m2", "a line between two texts", f"Before.{forms.minimax(W, ONE)}After.", ["Before.", A, "After."]),
    ("harmony", "a line between two texts", f"<|channel|>commentary<|message|>Before.<|end|><|start|>assistant{forms.harmony(W, ONE)}<|start|>assistant<|channel|>final<|message|>After.", ["Before.", A, "After."]),
]  # fmt: skip

MORE_TOOLS = [
    make_tool("run", {"input": {"type": "object"}}),
    make_tool("note", {"data": {"type": "object"}}),
]

LINES = (*OTHER_SYNTAX, *TAGS_TOO_MANY, *ARGUMENTS, *AROUND)
CASES: list[Case] = [
    *(case for each in UNCLOSED for case in _make_unclosed(*each)),
    *(case for each in TAGGED for case in _make_tagged(*each)),
    *(Case(f"{family}: {what}", family, text, want, reasoning="harmony" if family == "harmony" else None, tools=[*TOOLS, *MORE_TOOLS]) for family, what, text, want in LINES),
    *(Case(f"{family or 'none'}, {reasoning}: {what}", family, text, want, reasoning=reasoning, opened=opened) for family, reasoning, what, opened, text, want in TAGS),
]  # fmt: skip
