"""Calls in the formats of hermes, qwen3_coder, seed_oss and plain JSON: as their templates write them, and as
models do. One line a case."""

# ruff: noqa: E501

from __future__ import annotations

import json
from typing import Any

from tests.helpers.parser_driver import Call, Case, Item, Reasoning, make_tool

# Arguments that any format must carry: one line a case.
VALUES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "get_weather", {"city": "Paris"}),
    ("typed", "get_weather", {"city": "Paris", "days": 3, "unit": "celsius", "detail": True}),
    ("numbers", "add", {"a": 3.0, "b": -0.5}),
    ("exponent", "add", {"a": 1e21, "b": 2.5e-07}),
    ("digits", "write_file", {"path": "007", "content": "3.0"}),
    ("empty", "now", {}),
    ("unicode", "get_weather", {"city": "Ústí nad Labem, 東京, 🌧️"}),
    ("newlines", "write_file", {"path": "a.py", "content": "def f():\n\n    return 1\n\n# end"}),
    ("quotes", "write_file", {"path": 'a "b" c', "content": "it's \\ \"x\" 'y' \\n {} []"}),
    ("markup", "write_file", {"path": "x.html", "content": "<b>1 < 2 && 3 > 2</b> <tool> </tool"}),
    ("json in text", "write_file", {"path": "x.json", "content": '{"a": [1, 2], "b": null}'}),
    ("words in text", "write_file", {"path": "true", "content": "null"}),
    ("null", "write_file", {"path": "p", "mode": None}),
    ("union", "write_file", {"path": "p", "mode": 420}),
    ("array", "write_file", {"path": "p", "tags": ["a", 'b "c"', "ř"]}),
    ("object", "write_file", {"path": "p", "meta": {"a": {"b": [1, {"c": None}]}, "d": True}}),
    ("reference", "book", {"where": {"city": "Brno", "zip": "60200", "at": 49.0}, "nights": 2}),
    ("floats in array", "book", {"prices": [1.0, 2.5, 3], "note": "ok"}),
    ("nullable", "book", {"nights": None, "note": None}),
    ("enum of all", "book", {"level": 2}),
    ("enum word", "book", {"level": "high"}),
    ("spaces", "write_file", {"path": "  p  ", "content": " \n x \n "}),
    ("tabs", "write_file", {"path": "Makefile", "content": "all:\n\tcc -o x x.c\r\n"}),
    ("long", "write_file", {"path": "p", "content": "0123456789 " * 40}),
]


def hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def ascii_hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _xml(name: str, arguments: dict[str, Any], line: str) -> str:
    """As the templates do: what is no string as JSON, each value on lines of its own or not."""
    values = "".join(
        f"<parameter={key}>{line}{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        f"{line}</parameter>{line}"
        for key, value in arguments.items()
    )
    return f"<function={name}>{line}{values}</function>{line}"


def coder(name: str, arguments: dict[str, Any]) -> str:
    return "<tool_call>\n" + _xml(name, arguments, "\n") + "</tool_call>"


def seed(name: str, arguments: dict[str, Any]) -> str:
    return "<seed:tool_call>\n" + _xml(name, arguments, "\n") + "</seed:tool_call>"


def flat(name: str, arguments: dict[str, Any]) -> str:
    return "<seed:tool_call>" + _xml(name, arguments, "") + "</seed:tool_call>"


def plain(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


FORMATS = {
    "hermes": (("hermes", hermes), ("hermes ascii", ascii_hermes)),
    "qwen3_coder": (("coder", coder),),
    "seed_oss": (("seed", seed),),
    "json": (("plain", plain),),
}


def _make_well_formed() -> list[Case]:
    cases = [
        Case(f"{form}: {kind}", family, write(name, arguments), [Call(name, arguments)], well_formed=True)
        for family, formats in FORMATS.items()
        for form, write in formats
        for kind, name, arguments in VALUES
    ]
    first, second = ("get_weather", {"city": "Oslo"}), ("add", {"a": 1, "b": 2.0})
    both: list[Item] = [Call(*first), Call(*second)]
    for family, formats in FORMATS.items():
        if family == "json":
            continue
        form, write = formats[0]
        one, two = write(*first), write(*second)
        cases += [
            Case(f"{form}: two calls", family, f"{one}\n{two}", both),
            Case(f"{form}: three without space", family, one + two + one, [*both, Call(*first)]),
            Case(f"{form}: text before", family, f"Let me look.\n\n{one}", ["Let me look.", Call(*first)]),
            Case(f"{form}: text after", family, f"{one}\n\nDone. ", [Call(*first), "Done. "]),
            Case(
                f"{form}: text between",
                family,
                f"A {one} and\n{two}",
                ["A", Call(*first), "and", Call(*second)],
            ),
            Case(f"{form}: space around", family, f"\n\n  {one}  \n\n", [Call(*first)]),
            Case(
                f"{form}: reasoning before",
                family,
                f"<think>\nI need the {one[:9]}.\n</think>\n\n{one}",
                [Reasoning(f"I need the {one[:9]}."), Call(*first)],
                reasoning="think",
            ),
            Case(
                f"{form}: reasoning between",
                family,
                f"{one}<think>Now add.</think>{two}<think>and?</think>Done",
                [Call(*first), Reasoning("Now add."), Call(*second), Reasoning("and?"), "Done"],
                reasoning="think",
                opened=False,
            ),
            Case(
                f"{form}: prompt opened reasoning",
                family,
                f"hm\n</think>\n{one}",
                [Reasoning("hm"), Call(*first)],
                reasoning="think",
                opened=True,
            ),
            Case(
                f"{form}: calls in endless reasoning",
                family,
                f"hm {one}",
                [Reasoning(f"hm {one}"), Call(*first)],
                reasoning="think",
                opened=True,
            ),
            Case(f"{form}: no tools", family, f"x {one} y", [f"x {one} y"], tools=[]),
            Case(
                f"{form}: not offered",
                family,
                f"x\n {write('rm', {'f': '/'})} y",
                [f"x\n {write('rm', {'f': '/'})} y"],
            ),
            Case(
                f"{form}: not offered, then offered",
                family,
                f"{write('rm', {'f': 1})}\n{one}",
                [write("rm", {"f": 1}), Call(*first)],
            ),
            Case(
                f"{form}: almost the name",
                family,
                write("get_weather2", {"city": "x"}),
                [write("get_weather2", {"city": "x"})],
            ),
            Case(
                f"{form}: a reasoning tag in a value",
                family,
                write("write_file", {"path": "p", "content": "<think> a </think>"}),
                [Call("write_file", {"path": "p", "content": "<think> a </think>"})],
                reasoning="think",
            ),
        ]
    return cases


def _deep(levels: int) -> dict[str, Any]:
    return {"a": _deep(levels - 1)} if levels > 1 else {}


W, B = "get_weather", "book"
MALFORMED: list[Case] = [
    # hermes: what models write instead
    Case("hermes: arguments first", "hermes", '<tool_call>{"arguments": {"city": "A"}, "name": "get_weather"}</tool_call>', [Call(W, {"city": "A"})]),
    Case("hermes: arguments in a string", "hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"A\\"}"}</tool_call>', [Call(W, {"city": "A"})]),
    Case("hermes: arguments in two strings", "hermes", '<tool_call>{"name": "now", "arguments": "\\"{}\\""}</tool_call>', [Call("now", {})]),
    Case("hermes: no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
    Case("hermes: null arguments", "hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [Call("now", {})]),
    Case("hermes: empty string of arguments", "hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', [Call("now", {})]),
    Case("hermes: empty array of arguments", "hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>', [Call("now", {})]),
    Case("hermes: parameters", "hermes", '<tool_call>{"name": "get_weather", "parameters": {"city": "A"}}</tool_call>', [Call(W, {"city": "A"})]),
    Case("hermes: more members", "hermes", '<tool_call>{"id": 7, "type": "function", "name": "get_weather", "arguments": {"city": "A"}, "x": [{}]}</tool_call>', [Call(W, {"city": "A"})]),
    Case("hermes: a function object", "hermes", '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "A"}}}</tool_call>', [Call(W, {"city": "A"})]),
    Case("hermes: no last brace", "hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "A"}\n</tool_call> x', [Call(W, {"city": "A"}), "x"]),
    Case("hermes: no end tag", "hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "A"}}', [Call(W, {"city": "A"})]),
    Case("hermes: no end tag, then another", "hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n<tool_call>\n{"name": "now", "arguments": {}}', [Call("now", {}), Call("now", {})]),
    Case("hermes: array in a block", "hermes", '<tool_call>[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "A"}}]</tool_call>', [Call("now", {}), Call(W, {"city": "A"})]),
    Case("hermes: two in a block", "hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "get_weather", "arguments": {"city": "A"}}\n</tool_call>', [Call("now", {}), Call(W, {"city": "A"})]),
    Case("hermes: array with one not offered", "hermes", '<tool_call>[{"name": "now", "arguments": {}}, {"name": "rm", "arguments": {}}]</tool_call>.', [Call("now", {}), ', {"name": "rm", "arguments": {}}]</tool_call>.']),
    Case("hermes: one not offered first", "hermes", '<tool_call>[{"name": "rm"}, {"name": "now"}]</tool_call>', ['<tool_call>[{"name": "rm"}', Call("now", {}), "]</tool_call>"]),
    Case("hermes: Nemotron's tags", "hermes", '<TOOLCALL>[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1, "b": 2}}]</TOOLCALL>', [Call("now", {}), Call("add", {"a": 1, "b": 2})]),
    Case("hermes: XML inside", "hermes", coder(W, {"city": "A", "days": 2}), [Call(W, {"city": "A", "days": 2})]),
    Case("hermes: naked XML", "hermes", "Sure.\n" + _xml(W, {"city": "A"}, "\n") + "</tool_call>", ["Sure.", Call(W, {"city": "A"})]),
    Case("hermes: array written into a string", "hermes", hermes("write_file", {"path": "p", "tags": '["a", "b"]'}), [Call("write_file", {"path": "p", "tags": ["a", "b"]})]),
    Case("hermes: object written into a string", "hermes", hermes(B, {"where": '{"city": "A", "at": 1.0}'}), [Call(B, {"where": {"city": "A", "at": 1.0}})]),
    Case("hermes: number written into a string", "hermes", hermes("add", {"a": "3.0", "b": "4"}), [Call("add", {"a": 3.0, "b": 4})]),
    Case("hermes: word written into a string", "hermes", hermes(W, {"city": "A", "detail": "true"}), [Call(W, {"city": "A", "detail": True})]),
    Case("hermes: number where a string is due", "hermes", hermes(B, {"where": {"zip": 60200}}), [Call(B, {"where": {"zip": "60200"}})]),
    Case("hermes: no type fits", "hermes", hermes("add", {"a": "three"}), [Call("add", {"a": "three"})]),
    Case("hermes: what may be a string stays one", "hermes", hermes(B, {"key": "12", "note": "null", "free": "[1]"}), [Call(B, {"key": "12", "note": "null", "free": "[1]"})]),
    Case("hermes: raw newline in a string", "hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "A\nB\tC"}}</tool_call>', [Call(W, {"city": "A\nB\tC"})]),
    Case("hermes: escapes that JSON has not", "hermes", r'<tool_call>{"name": "get_weather", "arguments": {"city": "it\'s \d+ \x"}}</tool_call>', [Call(W, {"city": r"it's \d+ \x"})]),
    Case("hermes: escaped unicode", "hermes", r'<tool_call>{"name": "get_weather", "arguments": {"city": "\u00da \ud83c\udf27 \/"}}</tool_call>', [Call(W, {"city": "Ú 🌧 /"})]),
    Case("hermes: half a surrogate pair", "hermes", r'<tool_call>{"name": "get_weather", "arguments": {"city": "a\ud83cb\udf27"}}</tool_call>', [Call(W, {"city": "a\ufffdb\ufffd"})]),
    Case("hermes: Python's words", "hermes", '<tool_call>{"name": "write_file", "arguments": {"mode": None, "meta": {"a": True, "b": False}}}</tool_call>', [Call("write_file", {"mode": None, "meta": {"a": True, "b": False}})]),
    Case("hermes: spaces everywhere", "hermes", '<tool_call> \n { "name" : "add" ,\n "arguments" : { "a" : 1 , "b" : [ 1 , { } , [ ] ] } } \n </tool_call>', [Call("add", {"a": 1, "b": [1, {}, []]})]),
    # hermes: what is no call
    Case("hermes: no JSON", "hermes", "<tool_call>get_weather(city)</tool_call> ok", ["<tool_call>get_weather(city)</tool_call> ok"]),
    Case("hermes: no object", "hermes", "<tool_call>[1, 2]</tool_call>", ["<tool_call>[1, 2]</tool_call>"]),
    Case("hermes: empty block", "hermes", "a <tool_call>\n</tool_call> b", ["a <tool_call>\n</tool_call> b"]),
    Case("hermes: empty object", "hermes", "<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
    Case("hermes: no name", "hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', ['<tool_call>{"arguments": {"a": 1}}</tool_call>']),
    Case("hermes: name is a number", "hermes", '<tool_call>{"name": 3}</tool_call>', ['<tool_call>{"name": 3}</tool_call>']),
    Case("hermes: arguments are an array", "hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', ['<tool_call>{"name": "now", "arguments": [1]}</tool_call>']),
    Case("hermes: arguments are broken JSON in a string", "hermes", '<tool_call>{"name": "now", "arguments": "{1"}</tool_call>', ['<tool_call>{"name": "now", "arguments": "{1"}</tool_call>']),
    Case("hermes: Python's quotes", "hermes", "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>", ["<tool_call>{'name': 'now', 'arguments': {}}</tool_call>"]),
    Case("hermes: Python's quotes in arguments", "hermes", "<tool_call>{\"name\": \"now\", \"arguments\": {'a': 1}}</tool_call>", ["<tool_call>{\"name\": \"now\", \"arguments\": {'a': 1}}</tool_call>"]),
    Case("hermes: broken behind a member", "hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, b: 2}}</tool_call>', [Call("add", {"a": 1}), ", b: 2}}</tool_call>"]),
    Case("hermes: broken number", "hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1.2.3}}</tool_call>', [Call("add", {"a": 1}), ', "b": 1.2.3}}</tool_call>']),
    Case("hermes: nothing JSON knows", "hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', ['<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>']),
    Case("hermes: deeper than any call", "hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a": ' * 80 + "1" + "}" * 80 + "}</tool_call>", [Call("now", _deep(64)), '"a": ' + '{"a": ' * 16 + "1" + "}" * 80 + "}</tool_call>"]),
    Case("hermes: a lost end tag", "hermes", "That </tool_call> is text.", ["That </tool_call> is text."]),
    Case("hermes: almost markers", "hermes", "a < b, <tool, <tool_calls>, <TOOL_CALL>, <functions=x <", ["a < b, <tool, <tool_calls>, <TOOL_CALL>, <functions=x <"]),
    Case("hermes: opener twice", "hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
    Case("hermes: text then call in broken block", "hermes", '<tool_call>Well: <tool_call>{"name": "now"}</tool_call>', ["<tool_call>Well:", Call("now", {})]),
    Case("hermes: more braces", "hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', [Call("now", {})]),
    # XML: what models write instead
    Case("coder: no opener", "qwen3_coder", _xml(W, {"city": "A"}, "\n") + "</tool_call>", [Call(W, {"city": "A"})]),
    Case("coder: no tags around", "qwen3_coder", "I see.\n" + _xml(W, {"city": "A"}, ""), ["I see.", Call(W, {"city": "A"})]),
    Case("coder: JSON inside", "qwen3_coder", hermes(W, {"city": "A"}), [Call(W, {"city": "A"})]),
    Case("coder: one line", "qwen3_coder", "<tool_call>" + _xml("add", {"a": 1, "b": 3.0}, "") + "</tool_call>", [Call("add", {"a": 1, "b": 3.0})]),
    Case("coder: value's end forgotten", "qwen3_coder", "<tool_call>\n<function=write_file>\n<parameter=path>\np\n<parameter=content>\nx\n</function>\n</tool_call>", [Call("write_file", {"path": "p", "content": "x"})]),
    Case("coder: bracket forgotten", "qwen3_coder", "<tool_call>\n<function=get_weather\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>", [Call(W, {"city": "A"})]),
    Case("coder: quoted names", "qwen3_coder", '<tool_call>\n<function="get_weather">\n<parameter="city">A</parameter>\n</function>\n</tool_call>', [Call(W, {"city": "A"})]),
    Case("coder: Python's words and list", "qwen3_coder", "<tool_call><function=write_file><parameter=tags>['a', 'b']</parameter><parameter=mode>None</parameter></function></tool_call>", [Call("write_file", {"tags": ["a", "b"], "mode": None})]),
    Case("coder: array twice encoded", "qwen3_coder", '<tool_call><function=write_file><parameter=tags>"[\\"a\\"]"</parameter></function></tool_call>', [Call("write_file", {"tags": ["a"]})]),
    Case("coder: capital words", "qwen3_coder", "<function=get_weather><parameter=detail>True</parameter></function>", [Call(W, {"detail": True})]),
    Case("coder: whole float for an integer", "qwen3_coder", "<function=get_weather><parameter=days>3.0</parameter></function>", [Call(W, {"days": 3})]),
    Case("coder: fraction for an integer", "qwen3_coder", "<function=get_weather><parameter=days>3.5</parameter></function>", [Call(W, {"days": 3.5})]),
    Case("coder: number in another notation", "qwen3_coder", "<function=add><parameter=a>+.5</parameter><parameter=b>007</parameter></function>", [Call("add", {"a": 0.5, "b": 7})]),
    Case("coder: number that is none", "qwen3_coder", "<function=add><parameter=a>nan</parameter><parameter=b>1e999</parameter></function>", [Call("add", {"a": "nan", "b": 1e999})]),
    Case("coder: space around a number", "qwen3_coder", "<function=add><parameter=a>\n 3 \n</parameter></function>", [Call("add", {"a": 3})]),
    Case("coder: free of schema", "qwen3_coder", "<function=book><parameter=free>12</parameter><parameter=other>[1, 2]</parameter><parameter=more>x</parameter></function>", [Call(B, {"free": "12", "other": [1, 2], "more": "x"})]),
    Case("coder: union prefers the number", "qwen3_coder", "<function=book><parameter=key>12</parameter><parameter=note>12</parameter></function>", [Call(B, {"key": 12, "note": "12"})]),
    Case("coder: empty value", "qwen3_coder", "<function=write_file><parameter=path></parameter><parameter=content>\n</parameter></function>", [Call("write_file", {"path": "", "content": ""})]),
    Case("coder: newlines of the value", "qwen3_coder", "<function=write_file><parameter=content>\n\n\na\n\n\n</parameter></function>", [Call("write_file", {"content": "\n\na\n\n"})]),
    Case("coder: a value with tags of the format", "qwen3_coder", "<function=write_file><parameter=content>use <function=x> and <tool_call></tool_call></parameter></function>", [Call("write_file", {"content": "use <function=x> and <tool_call></tool_call>"})]),
    Case("coder: nothing of a function", "qwen3_coder", "Write <function=name> to call.", ["Write <function=name> to call."]),
    Case("coder: words in a function", "qwen3_coder", "<function=now>please</function>", ["<function=now>please</function>"]),
    Case("coder: words behind a parameter", "qwen3_coder", "<function=add><parameter=a>1</parameter>please</function>", [Call("add", {"a": 1}), "please</function>"]),
    Case("coder: empty name", "qwen3_coder", "<function=><parameter=a>1</parameter></function>", ["<function=><parameter=a>1</parameter></function>"]),
    Case("coder: empty block", "qwen3_coder", "<tool_call>\n</tool_call>", []),
    Case("seed: flat", "seed_oss", flat("add", {"a": 1, "b": 2.0}), [Call("add", {"a": 1, "b": 2.0})]),
    Case("seed: two functions in a block", "seed_oss", "<seed:tool_call>\n" + _xml("now", {}, "\n") + _xml(W, {"city": "A"}, "\n") + "</seed:tool_call>", [Call("now", {}), Call(W, {"city": "A"})]),
    Case("seed: no opener", "seed_oss", _xml(W, {"city": "A"}, "\n") + "</seed:tool_call>\nx", [Call(W, {"city": "A"}), "x"]),
    Case("seed: reasoning", "seed_oss", "<seed:think>\nhm <seed:cot_budget_reflect>10 left</seed:cot_budget_reflect>\n</seed:think>\n" + seed("now", {}), [Reasoning("hm <seed:cot_budget_reflect>10 left</seed:cot_budget_reflect>"), Call("now", {})], reasoning="seed_oss"),
    Case("seed: no function", "seed_oss", "<seed:tool_call>now</seed:tool_call>", ["<seed:tool_call>now</seed:tool_call>"]),
]  # fmt: skip

# What a cut leaves: strings, arrays and objects are closed, half members dropped; before that all is text.
CUTS: list[tuple[str, str, str, list[Item]]] = [
    ("hermes", "in the marker", "Hi <tool_ca", ["Hi <tool_ca"]),
    ("hermes", "behind the marker", "Hi <tool_call>", ["Hi <tool_call>"]),
    ("hermes", "in the name", '<tool_call>{"name": "get_we', ['<tool_call>{"name": "get_we']),
    ("hermes", "behind the name", '<tool_call>{"name": "now", ', ['<tool_call>{"name": "now", ']),
    ("hermes", "before arguments", '<tool_call>{"name": "now", "arguments": {', ['<tool_call>{"name": "now", "arguments": {']),
    ("hermes", "in a key", '<tool_call>{"name": "add", "arguments": {"a": 1, "b', [Call("add", {"a": 1})]),
    ("hermes", "behind a key", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": ', [Call("add", {"a": 1})]),
    ("hermes", "in a number", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 12', [Call("add", {"a": 1})]),
    ("hermes", "in a word", '<tool_call>{"name": "write_file", "arguments": {"path": "p", "mode": nul', [Call("write_file", {"path": "p"})]),
    ("hermes", "in a string", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par', [Call(W, {"city": "Par"})]),
    ("hermes", "in an escape", '<tool_call>{"name": "get_weather", "arguments": {"city": "P\\u00', [Call(W, {"city": "P"})]),
    ("hermes", "in a surrogate pair", '<tool_call>{"name": "get_weather", "arguments": {"city": "P\\ud83c\\ud', [Call(W, {"city": "P"})]),
    ("hermes", "in an array", '<tool_call>{"name": "write_file", "arguments": {"tags": ["a", "b', [Call("write_file", {"tags": ["a", "b"]})]),
    ("hermes", "in an object", '<tool_call>{"name": "write_file", "arguments": {"meta": {"a": {"b": [1, ', [Call("write_file", {"meta": {"a": {"b": [1]}}})]),
    ("hermes", "behind arguments", '<tool_call>{"name": "add", "arguments": {"a": 1}', [Call("add", {"a": 1})]),
    ("hermes", "in arguments that came first", '<tool_call>{"arguments": {"a": 1', ['<tool_call>{"arguments": {"a": 1']),
    ("hermes", "in arguments in a string", '<tool_call>{"name": "now", "arguments": "{', ['<tool_call>{"name": "now", "arguments": "{']),
    ("hermes", "in the end tag", '<tool_call>{"name": "now", "arguments": {}}\n</tool', [Call("now", {}), "</tool"]),
    ("hermes", "in the second call", '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "add", ', [Call("now", {}), '<tool_call>{"name": "add", ']),
    ("hermes", "in an array's second call", '<tool_call>[{"name": "now"}, {"name": "ad', [Call("now", {}), ', {"name": "ad']),
    ("hermes", "in the second call's string", '<tool_call>[{"name": "now"}, {"name": "get_weather", "arguments": {"city": "P', [Call("now", {}), Call(W, {"city": "P"})]),
    ("qwen3_coder", "in the function's name", "<tool_call>\n<function=get_w", ["<tool_call>\n<function=get_w"]),
    ("qwen3_coder", "behind the function", "<tool_call>\n<function=get_weather>\n", ["<tool_call>\n<function=get_weather>\n"]),
    ("qwen3_coder", "in a key", "<tool_call>\n<function=get_weather>\n<parameter=ci", ["<tool_call>\n<function=get_weather>\n<parameter=ci"]),
    ("qwen3_coder", "in a string", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", [Call(W, {"city": "Par"})]),
    ("qwen3_coder", "in a value's end tag", "<function=get_weather><parameter=city>Par</para", [Call(W, {"city": "Par"})]),
    ("qwen3_coder", "behind what may begin an end tag", "<function=get_weather><parameter=city>Par<", [Call(W, {"city": "Par<"})]),
    ("qwen3_coder", "in a number", "<function=add><parameter=a>1</parameter><parameter=b>2", [Call("add", {"a": 1})]),
    ("qwen3_coder", "in the first number", "<function=add><parameter=a>1", ["<function=add><parameter=a>1"]),
    ("qwen3_coder", "behind a value", "<function=add><parameter=a>1</parameter>\n", [Call("add", {"a": 1})]),
    ("qwen3_coder", "in the function's end", "<function=add><parameter=a>1</parameter>\n</func", [Call("add", {"a": 1})]),
    ("seed_oss", "in a string", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Par", [Call(W, {"city": "Par"})]),
    ("seed_oss", "in the marker", "<seed:tool_", ["<seed:tool_"]),
]  # fmt: skip

PLAIN: list[Case] = [
    Case("json: an array", "json", f"[{plain(W, {'city': 'A'})}, {plain('now', {})}]", [Call(W, {"city": "A"}), Call("now", {})]),
    Case("json: in a fence", "json", f"```json\n{plain(W, {'city': 'A'})}\n```\n", [Call(W, {"city": "A"})]),
    Case("json: in a bare fence", "json", f"```\n[{plain('now', {})}]\n```", [Call("now", {})]),
    Case("json: space around", "json", f"\n {plain('now', {})} \n", [Call("now", {})]),
    Case("json: OpenAI's format", "json", '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}', [Call("add", {"a": 1})]),
    Case("json: parameters", "json", '{"name": "add", "parameters": {"a": 3.0}}', [Call("add", {"a": 3.0})]),
    Case("json: mended", "json", '{"name": "add", "arguments": {"a": "3.0"}}', [Call("add", {"a": 3.0})]),
    Case("json: not offered", "json", plain("rm", {"f": "/"}), [plain("rm", {"f": "/"})]),
    Case("json: one of two not offered", "json", f"[{plain('now', {})}, {plain('rm', {})}]", [f"[{plain('now', {})}, {plain('rm', {})}]"]),
    Case("json: text before", "json", f"Use this: {plain('now', {})}", [f"Use this: {plain('now', {})}"]),
    Case("json: text after", "json", f"{plain('now', {})}\nThat is it.", [f"{plain('now', {})}\nThat is it."]),
    Case("json: text behind a fence", "json", f"```json\n{plain('now', {})}\n```\nDone", [f"```json\n{plain('now', {})}\n```\nDone"]),
    Case("json: other JSON", "json", '{"city": "Paris", "temperature": 3.0}', ['{"city": "Paris", "temperature": 3.0}']),
    Case("json: other JSON with a name", "json", '{"name": "Paris", "arguments": 3}', ['{"name": "Paris", "arguments": 3}']),
    Case("json: arguments are an array", "json", '{"name": "add", "arguments": [1]}', ['{"name": "add", "arguments": [1]}']),
    Case("json: an array of numbers", "json", "[1, 2, 3]", ["[1, 2, 3]"]),
    Case("json: an empty array", "json", "[]", ["[]"]),
    Case("json: code", "json", "```python\nprint(1)\n```", ["```python\nprint(1)\n```"]),
    Case("json: cut", "json", '{"name": "add", "arguments": {"a": 1', ['{"name": "add", "arguments": {"a": 1']),
    Case("json: broken", "json", "{'name': 'add'}", ["{'name': 'add'}"]),
    Case("json: nothing", "json", "", []),
    Case("json: white space alone", "json", "\n\n", ["\n\n"]),
    Case("json: behind reasoning", "json", f"<think>hm</think>\n{plain('now', {})}", [Reasoning("hm"), Call("now", {})], reasoning="think"),
    Case("json: no tools", "json", plain("now", {}), [plain("now", {})], tools=[]),
]  # fmt: skip

ODD_TOOLS: list[Case] = [
    Case("tools: without parameters", "hermes", hermes("ping", {"a": "1"}), [Call("ping", {"a": "1"})], tools=[{"type": "function", "function": {"name": "ping"}}]),
    Case("tools: null parameters", "hermes", hermes("ping", {}), [Call("ping", {})], tools=[{"type": "function", "function": {"name": "ping", "parameters": None}}]),
    Case("tools: a name with dots and dashes", "hermes", hermes("a.b-c_d/e", {"x": 1}), [Call("a.b-c_d/e", {"x": 1})], tools=[make_tool("a.b-c_d/e", {"x": {"type": "integer"}})]),
    Case("tools: endless reference", "qwen3_coder", coder("tree", {"node": {"left": {}}}), [Call("tree", {"node": {"left": {}}})], tools=[make_tool("tree", {"node": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": {"$ref": "#/$defs/n"}}})]),
    Case("tools: recursive schema", "qwen3_coder", coder("tree", {"node": {"left": {"left": {}}}}), [Call("tree", {"node": {"left": {"left": {}}}})], tools=[make_tool("tree", {"node": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": {"type": "object", "properties": {"left": {"$ref": "#/$defs/n"}}}}})]),
    Case("tools: reference to nowhere", "qwen3_coder", coder("f", {"x": "1"}), [Call("f", {"x": "1"})], tools=[make_tool("f", {"x": {"$ref": "#/nowhere/3"}})]),
    Case("tools: all of", "qwen3_coder", coder("f", {"x": 1}), [Call("f", {"x": 1})], tools=[make_tool("f", {"x": {"allOf": [{"type": "integer"}, {"minimum": 0}]}})]),
    Case("tools: nullable", "qwen3_coder", coder("f", {"x": None}), [Call("f", {"x": None})], tools=[make_tool("f", {"x": {"type": "string", "nullable": True}})]),
    Case("tools: const", "qwen3_coder", coder("f", {"x": 7}), [Call("f", {"x": 7})], tools=[make_tool("f", {"x": {"const": 7}})]),
    Case("tools: additional properties", "qwen3_coder", coder("f", {"any": 7}), [Call("f", {"any": 7})], tools=[make_tool("f", {}, additionalProperties={"type": "integer"})]),
    Case("tools: Python's type names", "qwen3_coder", coder("f", {"x": 1, "y": [2]}), [Call("f", {"x": 1, "y": [2]})], tools=[make_tool("f", {"x": {"type": "int"}, "y": {"type": "list"}})]),
    Case("tools: schema that is none", "qwen3_coder", coder("f", {"x": "1"}), [Call("f", {"x": "1"})], tools=[make_tool("f", {"x": True})]),
]  # fmt: skip

CASES: list[Case] = [
    *_make_well_formed(),
    *MALFORMED,
    *(Case(f"{family}: cut {where}", family, text, want) for family, where, text, want in CUTS),
    *PLAIN,
    *ODD_TOOLS,
]
