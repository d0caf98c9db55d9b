"""The newer formats as models write them: several calls, other spellings, what is no call, and what a cut leaves.
One line a case."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

from tests.helpers.parser_corpus.newer_formats import (
    MINIMAX,
    apertus,
    cohere,
    command_r,
    deepseek_v4,
    deepseek_v4_json,
    deepseek_v41,
    ernie45,
    functionary,
    functionary_v2,
    functionary_v25,
    functionary_v31,
    gigachat3,
    gigachat31,
    gigachat35,
    hunyuan_a13b,
    hunyuan_v3,
    hunyuan_v4,
    internlm2,
    jamba,
    kimi_k3,
    kimi_k3_json,
    ling3,
    minicpm5,
    minimax_m1,
    minimax_m3,
    muse,
    olmo3,
    plamo3,
    ui_tars,
)
from tests.helpers.parser_corpus.writing import dump
from tests.helpers.parser_driver import Call, Item, Reasoning

W, NOW = "get_weather", Call("now", {})
A, B = Call(W, {"city": "A"}), Call("add", {"a": 1, "b": 2.0})
ONE: dict[str, Any] = {"city": "A"}
TWO: dict[str, Any] = {"a": 1, "b": 2.0}
CUT = Call(W, {"city": "Pa"})

Line = tuple[str, str, str, list[Item]]  # family, what, text, items

_D, _D_END = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
_DI = '<｜DSML｜invoke name="get_weather">'
_DP = '<｜DSML｜parameter name="city" string="true">'
DEEPSEEK: list[Line] = [
    ("deepseek_v4", "two calls in a block", f"{_D}\n{_DI}\n{_DP}A</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n{_D_END}", [A, NOW]),
    ("deepseek_v4", "a block of 3.2", f"<｜DSML｜function_calls>\n{_DI}\n{_DP}A</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", [A]),
    ("deepseek_v4", "a call of 4.1", deepseek_v41(W, ONE), [A]),
    ("deepseek_v4", "no block", f"{_DI}{_DP}A</｜DSML｜parameter></｜DSML｜invoke>", [A]),
    ("deepseek_v4", "an empty block", f"Yes.\n\n{_D}\n{_D_END}", ["Yes."]),
    ("deepseek_v4", "a value without its kind", f"{_D}\n<｜DSML｜invoke name=\"add\">\n<｜DSML｜parameter name=\"a\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n{_D_END}", [Call("add", {"a": 1})]),
    ("deepseek_v4", "a number that says it is a string", f"{_D}\n<｜DSML｜invoke name=\"add\">\n<｜DSML｜parameter name=\"a\" string=\"true\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n{_D_END}", [Call("add", {"a": 1})]),
    ("deepseek_v4", "digits that are a string", f"{_D}\n<｜DSML｜invoke name=\"book\">\n<｜DSML｜parameter name=\"free\" string=\"true\">007</｜DSML｜parameter>\n</｜DSML｜invoke>\n{_D_END}", [Call("book", {"free": "007"})]),
    ("deepseek_v4", "a block in words", "Write <｜DSML｜invoke name= for it", ["Write <｜DSML｜invoke name= for it"]),
    ("deepseek_v4", "cut in the block's tag", "Hi\n\n<｜DSML｜tool_ca", ["Hi\n\n<｜DSML｜tool_ca"]),
    ("deepseek_v4", "cut in a string", f"{_D}\n{_DI}\n{_DP}Pa", [CUT]),
    ("deepseek_v4", "cut in an end tag", f"{_D}\n{_DI}\n{_DP}Pa</｜DSML｜param", [CUT]),
    ("deepseek_v4", "cut in an object", f"{_D}\n{_DI}\n{{\"city\": \"Pa", [CUT]),
    ("deepseek_v41", "two calls in a block", deepseek_v41(W, ONE).replace("\n</｜DSML｜ calls>", "\n<｜DSML｜ invoke name=\"now\">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"), [A, NOW]),
    ("deepseek_v41", "a call of 4", deepseek_v4(W, ONE), [A]),
    ("deepseek_v41", "all arguments in an object", '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n{"city": "A"}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>', [A]),
    ("deepseek_v41", "an empty block", "Yes.\n<｜DSML｜ calls>\n</｜DSML｜ calls>", ["Yes."]),
    ("deepseek_v41", "no block", '<｜DSML｜ invoke name="now"></｜DSML｜ invoke>', [NOW]),
    ("deepseek_v41", "a tag that closes itself", '<｜DSML｜ calls><｜DSML｜ invoke name="now"/></｜DSML｜ calls>', [NOW]),
    ("deepseek_v41", "cut in the tag", "<｜DSML｜ inv", ["<｜DSML｜ inv"]),
    ("deepseek_v41", "cut in a string", '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" string="true">Pa', [CUT]),
]  # fmt: skip

_KC, _KC_END = '<|open|>call tool="get_weather" index="1"<|sep|>', "<|close|>call<|sep|>"
_KA, _KA_END = '<|open|>argument key="city" type="string"<|sep|>', "<|close|>argument<|sep|>"
_K_NOW = '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
KIMI: list[Line] = [
    ("kimi_k3", "two calls in a channel", f"<|open|>tools<|sep|>{_KC}{_KA}A{_KA_END}{_KC_END}{_K_NOW}<|close|>tools<|sep|>", [A, NOW]),
    ("kimi_k3", "content in its channel", "Yes.<|close|>response<|sep|><|close|>message<|sep|>", ["Yes."]),
    ("kimi_k3", "content and a call", f"<|open|>response<|sep|>Look.<|close|>response<|sep|>{kimi_k3(W, ONE)}<|close|>message<|sep|>", ["Look.", A]),
    ("kimi_k3", "no content", f"<|close|>response<|sep|>{kimi_k3(W, ONE)}<|close|>message<|sep|><|end_of_msg|>", [A]),
    ("kimi_k3", "no channel", f"{_KC}{_KA}A{_KA_END}{_KC_END}", [A]),
    ("kimi_k3", "attributes in another order", f'<|open|>call index="1" tool="get_weather"<|sep|><|open|>argument type="string" key="city"<|sep|>A{_KA_END}{_KC_END}', [A]),
    ("kimi_k3", "escapes in a key", f'<|open|>call tool="book" index="1"<|sep|><|open|>argument key="a &amp; &quot;b&quot;" type="number"<|sep|>1{_KA_END}{_KC_END}', [Call("book", {'a & "b"': 1})]),
    ("kimi_k3", "a string without a schema", f'<|open|>call tool="book" index="1"<|sep|><|open|>argument key="free" type="string"<|sep|>7{_KA_END}{_KC_END}', [Call("book", {"free": "7"})]),
    ("kimi_k3", "a number without a schema", f'<|open|>call tool="book" index="1"<|sep|><|open|>argument key="free" type="number"<|sep|>7{_KA_END}{_KC_END}', [Call("book", {"free": 7})]),
    ("kimi_k3", "an end tag within a value", f"{_KC}{_KA}a<|close|>argument<|sep|>b{_KA_END}{_KC_END}", [Call(W, {"city": "a<|close|>argument<|sep|>b"})]),
    ("kimi_k3", "an argument without a key", f'{_KC}<|open|>argument type="string"<|sep|>A{_KA_END}{_KC_END}', [f'{_KC}<|open|>argument type="string"<|sep|>A{_KA_END}{_KC_END}']),
    ("kimi_k3", "a call without a tool", '<|open|>call index="1"<|sep|><|close|>call<|sep|>', ['<|open|>call index="1"<|sep|><|close|>call<|sep|>']),
    ("kimi_k3", "cut in the opening tag", '<|open|>call tool="get_w', ['<|open|>call tool="get_w']),
    ("kimi_k3", "cut in a string", f"{_KC}{_KA}Pa", [CUT]),
    ("kimi_k3", "cut in an end tag", f"{_KC}{_KA}Pa<|close|>argu", [CUT]),
    ("kimi_k3", "cut in the next argument", f"{_KC}{_KA}A{_KA_END}<|open|>argument key", [A]),
    ("kimi_k3", "cut in an object", kimi_k3_json(W, {"city": "Pa"}).split('"}')[0], [CUT]),
]  # fmt: skip

_M = MINIMAX
_MI = f'{_M}<invoke name="write_file">'
MINIMAX_LINES: list[Line] = [
    ("minimax_m3", "two calls in a block", minimax_m3(W, ONE).replace(f"\n{_M}</tool_call>", f'\n{_M}<invoke name="now">{_M}</invoke>\n{_M}</tool_call>'), [A, NOW]),
    ("minimax_m3", "no block", f'{_M}<invoke name="now">{_M}</invoke>', [NOW]),
    ("minimax_m3", "lines between the tags", f'{_M}<tool_call>\n{_M}<invoke name="get_weather">\n{_M}<city>A{_M}</city>\n{_M}<days>3{_M}</days>\n{_M}</invoke>\n{_M}</tool_call>', [Call(W, {"city": "A", "days": 3})]),
    ("minimax_m3", "an empty array and an empty object", f"{_MI}{_M}<tags>{_M}</tags>{_M}<meta>{_M}</meta>{_M}</invoke>", [Call("write_file", {"tags": [], "meta": {}})]),
    ("minimax_m3", "elements in elements", f"{_MI}{_M}<meta>{_M}<a>{_M}<b>x{_M}</b>{_M}</a>{_M}<c>1{_M}</c>{_M}</meta>{_M}</invoke>", [Call("write_file", {"meta": {"a": {"b": "x"}, "c": 1}})]),
    ("minimax_m3", "a member twice", f"{_MI}{_M}<meta>{_M}<a>1{_M}</a>{_M}<a>2{_M}</a>{_M}</meta>{_M}</invoke>", [Call("write_file", {"meta": {"a": [1, 2]}})]),
    ("minimax_m3", "items of an array by another name", f"{_MI}{_M}<tags>{_M}<tag>x{_M}</tag>{_M}<tag>7{_M}</tag>{_M}</tags>{_M}</invoke>", [Call("write_file", {"tags": ["x", "7"]})]),
    ("minimax_m3", "an array as JSON", f'{_MI}{_M}<tags>["x", "y"]{_M}</tags>{_M}</invoke>', [Call("write_file", {"tags": ["x", "y"]})]),
    ("minimax_m3", "text beside elements", f"{_MI}{_M}<path>p{_M}</path>{_M}<meta>x{_M}<a>1{_M}</a>{_M}</meta>{_M}</invoke>", [Call("write_file", {"path": "p"}), f"{_M}<meta>x{_M}<a>1{_M}</a>{_M}</meta>{_M}</invoke>"]),
    ("minimax_m3", "tags without their token in a value", f"{_MI}{_M}<content><path>x</path></invoke>{_M}</content>{_M}</invoke>", [Call("write_file", {"content": "<path>x</path></invoke>"})]),
    ("minimax_m3", "the tags of M2", '<invoke name="now"></invoke>', ['<invoke name="now"></invoke>']),
    ("minimax_m3", "cut in the token", "Hi ]<]mini", ["Hi ]<]mini"]),
    ("minimax_m3", "cut in a string", f'{_M}<invoke name="get_weather">{_M}<city>Pa', [CUT]),
    ("minimax_m3", "cut in an end tag", f'{_M}<invoke name="get_weather">{_M}<city>Pa]<]minimax[', [CUT]),
    ("minimax_m3", "cut in a number", f'{_M}<invoke name="get_weather">{_M}<city>Pa{_M}</city>{_M}<days>1', [CUT]),
    ("minimax_m3", "cut in an element", f"{_MI}{_M}<path>p{_M}</path>{_M}<tags>{_M}<item>x", [Call("write_file", {"path": "p"})]),
]  # fmt: skip

_F = '<function name="write_file">'
MINICPM: list[Line] = [
    ("minicpm5", "lines between the tags", '<function name="get_weather">\n<param name="city">A</param>\n<param name="days">3</param>\n</function>', [Call(W, {"city": "A", "days": 3})]),
    ("minicpm5", "no quotes", "<function name=get_weather><param name=city>A</param></function>", [A]),
    ("minicpm5", "entities", f"{_F}<param name=\"path\">a &amp;&lt;b&gt; &quot;c&apos; &x;</param></function>", [Call("write_file", {"path": "a &<b> \"c' &x;"})]),
    ("minicpm5", "entities in a list", f"{_F}<param name=\"tags\">[&quot;a &amp; b&quot;]</param></function>", [Call("write_file", {"tags": ["a & b"]})]),
    ("minicpm5", "no entities in CDATA", f"{_F}<param name=\"path\"><![CDATA[a &amp; b]]></param></function>", [Call("write_file", {"path": "a &amp; b"})]),
    ("minicpm5", "lines around CDATA", f"{_F}<param name=\"path\">\n<![CDATA[a]]>\n</param></function>", [Call("write_file", {"path": "a"})]),
    ("minicpm5", "an end of CDATA within it", f"{_F}<param name=\"path\"><![CDATA[a]]> b]]></param></function>", [Call("write_file", {"path": "a]]> b"})]),
    ("minicpm5", "an end tag within a value", f"{_F}<param name=\"path\">a</param> b</param></function>", [Call("write_file", {"path": "a</param> b"})]),
    ("minicpm5", "a number in CDATA", "<function name=\"add\"><param name=\"a\"><![CDATA[1]]></param></function>", [Call("add", {"a": 1})]),
    ("minicpm5", "Python's words", f"{_F}<param name=\"mode\">None</param><param name=\"meta\">{{'a': True}}</param></function>", [Call("write_file", {"mode": None, "meta": {"a": True}})]),
    ("minicpm5", "no space in the tags", '<functionname="get_weather"><paramname="city">A</param></function>', [A]),
    ("minicpm5", "all arguments in an object", '<function name="get_weather"><param name="arguments">{"city": "A", "days": "3"}</param></function>', [Call(W, {"city": "A", "days": 3})]),
    ("minicpm5", "all arguments in an object of Python", "<function name=\"get_weather\"><param name=\"properties\">{'city': 'A'}</param></function>", [A]),
    ("minicpm5", "no object where all arguments stand", '<function name="get_weather"><param name="arguments">A</param></function>', [Call(W, {"arguments": "A"})]),
    ("minicpm5", "a tag in words", "Use <function name=x> for it", ["Use <function name=x> for it"]),
    ("minicpm5", "two names on lines", "<function name=\nnow></function>", ["<function name=\nnow></function>"]),
    ("minicpm5", "an end tag too many", f"{minicpm5(W, ONE)}</function>", [A]),
    ("minicpm5", "cut in the opener", "<function na", ["<function na"]),
    ("minicpm5", "cut in a string", '<function name="get_weather"><param name="city">Pa', [CUT]),
    ("minicpm5", "cut in an end tag", '<function name="get_weather"><param name="city">Pa</par', [CUT]),
    ("minicpm5", "cut in an entity", '<function name="get_weather"><param name="city">Pa&am', [CUT]),
    ("minicpm5", "cut in CDATA", '<function name="get_weather"><param name="city"><![CDATA[Pa', [CUT]),
    ("minicpm5", "cut before CDATA", f"{_F}<param name=\"path\">p</param><param name=\"content\"><![CD", [Call("write_file", {"path": "p"})]),
]  # fmt: skip

_TWO_OBJECTS = f'{{"name": "get_weather", "arguments": {dump(ONE)}}}, {{"name": "now", "arguments": {{}}}}'
JAMBA: list[Line] = [
    ("jamba", "an array of two", f"<tool_calls>[{_TWO_OBJECTS}]</tool_calls>", [A, NOW]),
    ("jamba", "an array on lines", f"<tool_calls>\n[\n{_TWO_OBJECTS}\n]\n</tool_calls>", [A, NOW]),
    ("jamba", "two objects", f'<tool_calls>\n{{"name": "now", "arguments": {{}}}}\n{{"name": "get_weather", "arguments": {dump(ONE)}}}\n</tool_calls>', [NOW, A]),
    ("jamba", "ids", f'<tool_calls>[{{"name": "get_weather", "arguments": {dump(ONE)}, "id": "x1"}}]</tool_calls>', [A]),
    ("jamba", "arguments in a string", '<tool_calls>[{"name": "get_weather", "arguments": "{\\"city\\": \\"A\\"}"}]</tool_calls>', [A]),
    ("jamba", "no end tag", "<tool_calls>[" + _TWO_OBJECTS + "]", [A, NOW]),
    ("jamba", "an end tag too many", jamba(W, ONE) + "</tool_calls>", [A]),
    ("jamba", "one not offered first", '<tool_calls>[{"name": "rm", "arguments": {}}, {"name": "now", "arguments": {}}]</tool_calls>', ['<tool_calls>[{"name": "rm", "arguments": {}}', NOW, "]</tool_calls>"]),
    ("jamba", "words", "The tag <tool_calls> begins calls.", ["The tag <tool_calls> begins calls."]),
    ("jamba", "a list of numbers", "<tool_calls>[1, 2]</tool_calls>", ["<tool_calls>[1, 2]</tool_calls>"]),
    ("jamba", "cut in the tag", "Hi <tool_ca", ["Hi <tool_ca"]),
    ("jamba", "cut in a name", '<tool_calls>[{"name": "get_', ['<tool_calls>[{"name": "get_']),
    ("jamba", "cut in a string", '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Pa', [CUT]),
    ("jamba", "cut in a string behind a call", f'{minimax_m1("now", {})[:-13]}{{"name": "get_weather", "arguments": {{"city": "Pa', [NOW, CUT]),
]  # fmt: skip

_H_TWO = f"<tool_calls><tool_call>get_weather\n```json\n{dump(ONE)}\n```</tool_call>\n<tool_call>now\n```json\n{{}}\n```</tool_call></tool_calls>"
HUNYUAN: list[Line] = [
    ("hunyuan_a13b", "two calls in a block", _H_TWO, [A, NOW]),
    ("hunyuan_a13b", "no block", f"<tool_call>get_weather\n```json\n{dump(ONE)}\n```</tool_call>", [A]),
    ("hunyuan_a13b", "no fence", f"<tool_calls><tool_call>get_weather\n{dump(ONE)}</tool_call></tool_calls>", [A]),
    ("hunyuan_a13b", "an object with its name", f'<tool_calls><tool_call>{{"name": "get_weather", "arguments": {dump(ONE)}}}</tool_call></tool_calls>', [A]),
    ("hunyuan_a13b", "no arguments", "<tool_calls><tool_call>now</tool_call></tool_calls>", [NOW]),
    ("hunyuan_a13b", "an array of two", f"<tool_calls>[{_TWO_OBJECTS}]</tool_calls>", [A, NOW]),
    ("hunyuan_a13b", "an answer in tags", "<answer>\nYes.\n</answer>", ["Yes."]),
    ("hunyuan_a13b", "an answer and a call", f"<answer>\nLook.\n</answer>{hunyuan_a13b(W, ONE)}", ["Look.", A]),
    ("hunyuan_a13b", "words", "Write <tool_calls> here", ["Write <tool_calls> here"]),
    ("hunyuan_a13b", "cut in a name", "<tool_calls><tool_call>get_w", ["<tool_calls><tool_call>get_w"]),
    ("hunyuan_a13b", "cut in a string", '<tool_calls><tool_call>get_weather\n```json\n{"city": "Pa', [CUT]),
    ("hunyuan_a13b", "cut in the second call", _H_TWO.split("now")[0] + "no", [A, "<tool_call>no"]),
    ("hunyuan_v3", "two calls in a block", f"<tool_calls>\n{hunyuan_v3(W, ONE)[13:-14]}\n{hunyuan_v3('now', {})[13:-14]}\n</tool_calls>", [A, NOW]),
    ("hunyuan_v3", "no block", hunyuan_v3(W, ONE)[13:-14], [A]),
    ("hunyuan_v3", "an empty block", "Yes.\n<tool_calls>\n</tool_calls>", ["Yes."]),
    ("hunyuan_v3", "JSON in the tags", f'<tool_calls><tool_call>{{"name": "get_weather", "arguments": {dump(ONE)}}}</tool_call></tool_calls>', [A]),
    ("hunyuan_v3", "no lines", hunyuan_v3(W, ONE).replace("\n", ""), [A]),
    ("hunyuan_v3", "an end tag within a value", hunyuan_v4(W, {"city": "a</arg_value>b"}), [Call(W, {"city": "a</arg_value>b"})]),
    ("hunyuan_v3", "words of a tag", "Write <tool_call> here", ["Write <tool_call> here"]),
    ("hunyuan_v3", "answer tags", "<answer>Yes.</answer>", ["<answer>Yes.</answer>"]),
    ("hunyuan_v3", "cut in a name", "<tool_call>get_w", ["<tool_call>get_w"]),
    ("hunyuan_v3", "cut in a string", "<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Pa", [CUT]),
    ("hunyuan_v3", "cut in an end tag", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Pa</arg_", [CUT]),
]  # fmt: skip

LING: list[Line] = [
    ("ling3", "an end of turn as text", "Here is the answer.<|role_end|>", ["Here is the answer."]),
    ("ling3", "an end of turn behind a call", f"{ling3(W, ONE)}<|role_end|>", [A]),
    ("ling3", "no lines", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>A</arg_value></tool_call>", [A]),
    ("ling3", "tags in a value", ling3("write_file", {"path": "a </think> and <tool_call> b", "mode": 1}), [Call("write_file", {"path": "a </think> and <tool_call> b", "mode": 1})]),
    ("ling3", "a call in JSON", f'<tool_call>{{"name": "get_weather", "arguments": {dump(ONE)}}}</tool_call>', [A]),
    ("ling3", "words of a tag", "Write <tool_call> here", ["Write <tool_call> here"]),
    ("ling3", "cut in a name", "<tool_call>get_w", ["<tool_call>get_w"]),
    ("ling3", "cut in a string", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa", [CUT]),
    ("ling3", "cut in the end of turn", "Yes.<|role_e", ["Yes.<|role_e"]),
]  # fmt: skip

ERNIE: list[Line] = [
    ("ernie45", "content in its tags", "<response>\nYes.\n</response>\n", ["Yes."]),
    ("ernie45", "content and a call", f"<response>\nLook.\n</response>\n{ernie45(W, ONE)}", ["Look.", A]),
    ("ernie45", "two objects in a block", f"<tool_call>\n{_TWO_OBJECTS.replace('}, {', '}}{', 1).replace('}}{', '}' + chr(10) + '{')}\n</tool_call>", [A, NOW]),
    ("ernie45", "an array", f"<tool_call>[{_TWO_OBJECTS}]</tool_call>", [A, NOW]),
    ("ernie45", "parameters", '<tool_call>{"name": "get_weather", "parameters": {"city": "A"}}</tool_call>', [A]),
    ("ernie45", "an end tag too many", f"{ernie45(W, ONE)}\n</tool_call>", [A]),
    ("ernie45", "words", "Write <tool_call> here", ["Write <tool_call> here"]),
    ("ernie45", "cut in the tag", "<tool_ca", ["<tool_ca"]),
    ("ernie45", "cut in a string", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa', [CUT]),
    ("ernie45", "cut in the tag of content", "<response>\nYes.\n</respo", ["Yes.\n</respo"]),
]  # fmt: skip

OLMO: list[Line] = [
    ("olmo3", "two calls on lines", "<function_calls>get_weather(city='A')\nnow()</function_calls>", [A, NOW]),
    ("olmo3", "a list", "<function_calls>[get_weather(city='A'), now()]</function_calls>", [A, NOW]),
    ("olmo3", "lines around", "<function_calls>\nget_weather(city=\"A\")\n</function_calls>", [A]),
    ("olmo3", "JSON's words", '<function_calls>write_file(mode=null, meta={"a": true})</function_calls>', [Call("write_file", {"mode": None, "meta": {"a": True}})]),
    ("olmo3", "no end tag", "<function_calls>now()", [NOW]),
    ("olmo3", "an end tag too many", f"{olmo3('now', {})}</function_calls>", [NOW]),
    ("olmo3", "one not offered last", "<function_calls>now()\nrm(f='/')</function_calls>", [NOW, "rm(f='/')</function_calls>"]),
    ("olmo3", "words", "The tag <function_calls> it is", ["The tag <function_calls> it is"]),
    ("olmo3", "cut in a name", "<function_calls>get_we", ["<function_calls>get_we"]),
    ("olmo3", "cut in the second value", "<function_calls>get_weather(city='A', unit='cel", [A]),
    ("olmo3", "cut in the second call", "<function_calls>now()\nget_weather(ci", [NOW, "get_weather(ci"]),
]  # fmt: skip

APERTUS: list[Line] = [
    ("apertus", "two objects", f'<|tools_prefix|>[{{"get_weather": {dump(ONE)}}}, {{"now": {{}}}}]<|tools_suffix|>', [A, NOW]),
    ("apertus", "two members of an object", f'<|tools_prefix|>[{{"get_weather": {dump(ONE)}, "now": {{}}}}]<|tools_suffix|>', [A, NOW]),
    ("apertus", "an object without its array", f'<|tools_prefix|>{{"get_weather": {dump(ONE)}}}<|tools_suffix|>', [A]),
    ("apertus", "arguments in a string", '<|tools_prefix|>[{"get_weather": "{\\"city\\": \\"A\\"}"}]<|tools_suffix|>', [A]),
    ("apertus", "no arguments", '<|tools_prefix|>[{"now": null}]<|tools_suffix|>', [NOW]),
    ("apertus", "one not offered last", '<|tools_prefix|>[{"now": {}}, {"rm": {"f": 1}}]<|tools_suffix|>', [NOW, ', {"rm": {"f": 1}}]<|tools_suffix|>']),
    ("apertus", "an empty array", "<|tools_prefix|>[]<|tools_suffix|>", ["<|tools_prefix|>[]<|tools_suffix|>"]),
    ("apertus", "an empty object", "<|tools_prefix|>[{}]<|tools_suffix|>", ["<|tools_prefix|>[{}]<|tools_suffix|>"]),
    ("apertus", "no end token", f'<|tools_prefix|>[{{"get_weather": {dump(ONE)}}}]', [A]),
    ("apertus", "no last brace", f'<|tools_prefix|>[{{"get_weather": {dump(ONE)}]<|tools_suffix|>', [A]),
    ("apertus", "cut in a name", '<|tools_prefix|>[{"get_w', ['<|tools_prefix|>[{"get_w']),
    ("apertus", "cut in a string", '<|tools_prefix|>[{"get_weather": {"city": "Pa', [CUT]),
    ("apertus", "cut in the second call", '<|tools_prefix|>[{"now": {}}, {"get_weather": {"city": "Pa', [NOW, CUT]),
]  # fmt: skip

INTERN: list[Line] = [
    ("internlm2", "two calls side by side", f"{internlm2(W, ONE)}{internlm2('now', {})}", [A, NOW]),
    ("internlm2", "a space between the tokens", f'<|action_start|> <|plugin|>\n{{"name": "get_weather", "parameters": {dump(ONE)}}}<|action_end|>\n', [A]),
    ("internlm2", "arguments by their other name", f'<|action_start|><|plugin|>\n{{"name": "get_weather", "arguments": {dump(ONE)}}}<|action_end|>', [A]),
    ("internlm2", "an array", f"<|action_start|><|plugin|>[{_TWO_OBJECTS}]<|action_end|>", [A, NOW]),
    ("internlm2", "code", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>", ["<|action_start|><|interpreter|>\nprint(1)<|action_end|>"]),
    ("internlm2", "no plugin", f'<|action_start|>{{"name": "get_weather", "parameters": {dump(ONE)}}}<|action_end|>', [f'<|action_start|>{{"name": "get_weather", "parameters": {dump(ONE)}}}<|action_end|>']),
    ("internlm2", "an end token too many", internlm2(W, ONE) + "<|action_end|>", [A]),
    ("internlm2", "cut in the tokens", "Hi<|action_start|><|plu", ["Hi<|action_start|><|plu"]),
    ("internlm2", "cut in a string", '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Pa', [CUT]),
    ("internlm2", "cut behind the arguments", f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {dump(ONE)}', [A]),
]  # fmt: skip


def _p(name: str, inner: str = "", end: bool = True) -> str:
    return f"<|plamo:begin_{name}:plamo|>{inner}" + (f"<|plamo:end_{name}:plamo|>" if end else "")


_PN = _p("tool_name", W)
PLAMO: list[Line] = [
    ("plamo3", "two calls in a block", _p("tool_requests", _p("tool_request", _PN + _p("tool_arguments", dump(ONE))) + _p("tool_request", _p("tool_name", "now") + _p("tool_arguments", "{}"))) + "<|plamo:tag|>", [A, NOW]),
    ("plamo3", "no constraint", _p("tool_request", _PN + _p("tool_arguments", dump(ONE))), [A]),
    ("plamo3", "no arguments", _p("tool_request", _p("tool_name", "now") + _p("tool_arguments")), [NOW]),
    ("plamo3", "lines between the tags", plamo3(W, ONE).replace(":plamo|><|", ":plamo|>\n<|"), [A]),
    ("plamo3", "an end of turn", "Yes.<|plamo:tag|>", ["Yes."]),
    ("plamo3", "no name", _p("tool_request", "x"), [_p("tool_request", "x")]),
    ("plamo3", "no arguments' tag", _p("tool_request", _PN), [_p("tool_request", _PN)]),
    ("plamo3", "a request in words", "Use <|plamo:begin_tool_request:plamo|> so", ["Use <|plamo:begin_tool_request:plamo|> so"]),
    ("plamo3", "cut in a tag", "Hi <|plamo:begin_tool_req", ["Hi <|plamo:begin_tool_req"]),
    ("plamo3", "cut in a name", "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>get_", ["<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>get_"]),
    ("plamo3", "cut in a string", _p("tool_request", _PN + _p("tool_arguments", '{"city": "Pa', False), False), [CUT]),
    ("plamo3", "cut in an end tag", _p("tool_request", _PN + _p("tool_arguments", dump(ONE)), False) + "<|plamo:end_to", [A, "<|plamo:end_to"]),
]  # fmt: skip

_C_TWO = '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "A"}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}'
COHERE: list[Line] = [
    ("cohere", "two calls in a block", f"<|START_ACTION|>[\n    {_C_TWO}\n]<|END_ACTION|>", [A, NOW]),
    ("cohere", "text in its tags", "<|START_TEXT|>Yes.<|END_TEXT|>", ["Yes."]),
    ("cohere", "a response in its tags", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", ["Yes."]),
    ("cohere", "names of other formats", f"<|START_ACTION|>[{_TWO_OBJECTS}]<|END_ACTION|>", [A, NOW]),
    ("cohere", "an object without its array", '<|START_ACTION|>{"tool_name": "now", "parameters": {}}<|END_ACTION|>', [NOW]),
    ("cohere", "parameters first", '<|START_ACTION|>[{"parameters": {"city": "A"}, "tool_name": "get_weather"}]<|END_ACTION|>', [A]),
    ("cohere", "no parameters", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now"}]<|END_ACTION|>', [NOW]),
    ("cohere", "an end token too many", cohere(W, ONE) + "<|END_ACTION|>", [A]),
    ("cohere", "one not offered first", '<|START_ACTION|>[{"tool_name": "rm"}, {"tool_name": "now"}]<|END_ACTION|>', ['<|START_ACTION|>[{"tool_name": "rm"}', NOW, "]<|END_ACTION|>"]),
    ("cohere", "an empty array", "<|START_ACTION|>[]<|END_ACTION|>", ["<|START_ACTION|>[]<|END_ACTION|>"]),
    ("cohere", "cut in the id", '<|START_ACTION|>[\n    {"tool_call_id": "0', ['<|START_ACTION|>[\n    {"tool_call_id": "0']),
    ("cohere", "cut in a string", cohere(W, {"city": "Pa"}).split('"}')[0], [CUT]),
    ("command_r", "two calls in a fence", 'Action:\n```json\n[{"tool_name": "get_weather", "parameters": {"city": "A"}}, {"tool_name": "now", "parameters": {}}]\n```', [A, NOW]),
    ("command_r", "a plan before", f"Plan: I look.\n{command_r(W, ONE)}", ["Plan: I look.", A]),
    ("command_r", "no language", 'Action: ```\n[{"tool_name": "now", "parameters": {}}]\n```', [NOW]),
    ("command_r", "no fence", 'Action: [{"tool_name": "now"}]', ['Action: [{"tool_name": "now"}]']),
    ("command_r", "a plain answer", 'Action: ```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```', ['Action: ```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```']),
    ("command_r", "words", "Action: go home.", ["Action: go home."]),
    ("command_r", "cut in the fence", "Action:\n``", ["Action:\n``"]),
    ("command_r", "cut in a string", 'Action:\n```json\n[{"tool_name": "get_weather", "parameters": {"city": "Pa', [CUT]),
]  # fmt: skip

FUNCTIONARY: list[Line] = [
    ("functionary", "a call behind the prompt", f"get_weather\n{dump(ONE)}", [A]),
    ("functionary", "content behind the prompt", "all\nYes.", ["Yes."]),
    ("functionary", "content and two calls", f"all\nLook.{functionary(W, ONE)}{functionary('now', {})}", ["Look.", A, NOW]),
    ("functionary", "no recipient", "Yes, it is.", ["Yes, it is."]),
    ("functionary", "arrows in content", "all\na >>> b\nc", ["a >>> b\nc"]),
    ("functionary", "content behind a call", f"{functionary(W, ONE)}>>>all\nDone.", [A, "Done."]),
    ("functionary", "no JSON behind a name", "now\nit is", ["now\nit is"]),
    ("functionary", "cut in a name", "get_wea", ["get_wea"]),
    ("functionary", "cut in a string", 'get_weather\n{"city": "Pa', [CUT]),
    ("functionary", "cut in the second name", f"get_weather\n{dump(ONE)}>>>no", [A, ">>>no"]),
    ("functionary_v2", "a call behind the prompt", f"get_weather\n<|content|>{dump(ONE)}<|stop|>", [A]),
    ("functionary_v2", "content behind the prompt", "all\n<|content|>Yes.<|stop|>", ["Yes."]),
    ("functionary_v2", "content and two calls", f"all\n<|content|>Look.\n{functionary_v2(W, ONE)[:-8]}\n{functionary_v2('now', {})}", ["Look.", A, NOW]),
    ("functionary_v2", "no recipient", "Yes, it is.", ["Yes, it is."]),
    ("functionary_v2", "a recipient without content", "all\nYes.", ["all\nYes."]),
    ("functionary_v2", "cut in a name", "get_wea", ["get_wea"]),
    ("functionary_v2", "cut in a header", "all\n<|content|>Yes.\n<|from|>assistant\n<|reci", ["Yes.\n<|from|>assistant\n<|reci"]),
    ("functionary_v2", "cut in a string", 'get_weather\n<|content|>{"city": "Pa', [CUT]),
    ("functionary_v25", "two calls", f"{functionary_v25(W, ONE)}{functionary_v25('now', {})}", [A, NOW]),
    ("functionary_v25", "content before", f"Look.{functionary_v25(W, ONE)}", ["Look.", A]),
    ("functionary_v25", "no name", "<|reserved_special_token_249|>{}", ["<|reserved_special_token_249|>{}"]),
    ("functionary_v25", "no JSON", "<|reserved_special_token_249|>now\nx", ["<|reserved_special_token_249|>now\nx"]),
    ("functionary_v25", "null", "<|reserved_special_token_249|>now\nnull", ["<|reserved_special_token_249|>now\nnull"]),
    ("functionary_v25", "cut in the token", "Hi<|reserved_special", ["Hi<|reserved_special"]),
    ("functionary_v25", "cut in a name", "<|reserved_special_token_249|>get_w", ["<|reserved_special_token_249|>get_w"]),
    ("functionary_v25", "cut in a string", '<|reserved_special_token_249|>get_weather\n{"city": "Pa', [CUT]),
    ("functionary_v31", "two calls", f"{functionary_v31(W, ONE)}{functionary_v31('now', {})}", [A, NOW]),
    ("functionary_v31", "no end tag", f"<function=get_weather>{dump(ONE)}", [A]),
    ("functionary_v31", "an end tag too many", f"{functionary_v31(W, ONE)}</function>", [A]),
    ("functionary_v31", "words", "Write <function=x> for it", ["Write <function=x> for it"]),
    ("functionary_v31", "words behind a name", "<function=now>please</function>", ["<function=now>please</function>"]),
    ("functionary_v31", "code for the built-in tool", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("functionary_v31", "cut in the tag", "<function=get_", ["<function=get_"]),
    ("functionary_v31", "cut in a string", '<function=get_weather>{"city": "Pa', [CUT]),
]  # fmt: skip

GIGACHAT: list[Line] = [
    ("gigachat3", "content before", f"Look.{gigachat3(W, ONE)}", ["Look.", A]),
    ("gigachat3", "the role without its message", f'function call<|role_sep|>\n{{"name": "get_weather", "arguments": {dump(ONE)}}}', [A]),
    ("gigachat3", "the token of 3.1", gigachat31(W, ONE), [A]),
    ("gigachat3", "two calls side by side", gigachat3(W, ONE) + gigachat3("now", {}), [A, NOW]),
    ("gigachat3", "the end of a message", "Yes.<|message_sep|>\n\n", ["Yes."]),
    ("gigachat3", "the words", "A function call is due", ["A function call is due"]),
    ("gigachat3", "cut in the role", "Yes.<|message_sep|>\n\nfunction ca", ["Yes.", "function ca"]),
    ("gigachat3", "cut in a string", 'function call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Pa', [CUT]),
    ("gigachat31", "content before", f"Look.{gigachat31(W, ONE)}", ["Look.", A]),
    ("gigachat31", "the role of 3.0", gigachat3(W, ONE), [A]),
    ("gigachat31", "an array", f"<|function_call|>[{_TWO_OBJECTS}]", [A, NOW]),
    ("gigachat31", "arguments first", f'<|function_call|>{{"arguments": {dump(ONE)}, "name": "get_weather"}}', [A]),
    ("gigachat31", "arguments in a string", '<|function_call|>{"name": "get_weather", "arguments": "{\\"city\\": \\"A\\"}"}', [A]),
    ("gigachat31", "no JSON", "<|function_call|> now", ["<|function_call|> now"]),
    ("gigachat31", "cut in the token", "Hi<|function_c", ["Hi<|function_c"]),
    ("gigachat31", "cut in a string", '<|function_call|>{"name": "get_weather", "arguments": {"city": "Pa', [CUT]),
    ("gigachat35", "two calls in a block", gigachat35(W, ONE).replace("\n</｜GCML｜tool_calls>", '\n<｜GCML｜invoke name="now">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>'), [A, NOW]),
    ("gigachat35", "all arguments in an object", f'<｜GCML｜tool_calls>\n<｜GCML｜invoke name="get_weather">\n{dump(ONE)}\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>', [A]),
    ("gigachat35", "no block", '<｜GCML｜invoke name="now"></｜GCML｜invoke>', [NOW]),
    ("gigachat35", "an empty block", "Yes.\n<｜GCML｜tool_calls>\n</｜GCML｜tool_calls>", ["Yes."]),
    ("gigachat35", "the tags of DeepSeek", deepseek_v4_json("now", {}), [deepseek_v4_json("now", {})]),
    ("gigachat35", "a tag that closes itself", '<｜GCML｜invoke name="now"/>', [NOW]),
    ("gigachat35", "cut in the tag", "<｜GCML｜inv", ["<｜GCML｜inv"]),
    ("gigachat35", "cut in a string", '<｜GCML｜invoke name="get_weather">\n<｜GCML｜parameter name="city" string="true">Pa', [CUT]),
]  # fmt: skip

TARS: list[Line] = [
    ("ui_tars", "two actions", f"{ui_tars(W, ONE)}\n\nadd(a=1, b=2.0)", [A, B]),
    ("ui_tars", "two actions with their word", f"{ui_tars(W, ONE)}\n{ui_tars('now', {})}", [A, NOW]),
    ("ui_tars", "positional arguments", "Action: get_weather('A', 3)", [Call(W, {"city": "A", "days": 3})]),
    ("ui_tars", "all arguments in an object", 'Action: get_weather({"city": "A"})\nnow({})', [A, NOW]),
    ("ui_tars", "an object of Python", "Action: get_weather({'city': 'A'})", [A]),
    ("ui_tars", "cut in an object", 'Action: get_weather({"city": "Pa', [CUT]),
    ("ui_tars", "a place", "Action: get_weather(city='(1,2)')", [Call(W, {"city": "(1,2)"})]),
    ("ui_tars", "text before", f"I look.\n{ui_tars(W, ONE)}", ["I look.", A]),
    ("ui_tars", "text behind", f"{ui_tars(W, ONE)}\nDone.", [A, "Done."]),
    ("ui_tars", "words", "Action: go home.", ["Action: go home."]),
    ("ui_tars", "cut in a name", "Action: get_w", ["Action: get_w"]),
    ("ui_tars", "cut in the second value", "Action: get_weather(city='A', unit='cel", [A]),
    ("ui_tars", "cut in the second action", "Action: now()\n\nget_we", [NOW, "get_we"]),
]  # fmt: skip

_TO = " to={}<|message|>"
_S = "<|start|>assistant"
_MUSE = muse(W, ONE)
MUSE: list[Line] = [
    ("muse", "content", f"{_TO.format('user')}Yes.<|eot|>", ["Yes."]),
    ("muse", "no recipient", "<|message|>Yes.<|eot|>", ["Yes."]),
    ("muse", "no header", "Yes.<|eot|>", ["Yes."]),
    ("muse", "reasoning and content", f"{_TO.format('self')}hm<|eom|>{_S}{_TO.format('user')}Yes.<|eot|>", [Reasoning("hm"), "Yes."]),
    ("muse", "reasoning and a call", f"{_TO.format('self')}hm<|eom|>{_MUSE}", [Reasoning("hm"), A]),
    ("muse", "content and a call", f"{_TO.format('user')}Look.<|eom|>{_MUSE}", ["Look.", A]),
    ("muse", "a call behind the prompt", _MUSE.removeprefix(_S), [A]),
    ("muse", "a namespace", _MUSE.replace('name="get_weather"', 'name="get_weather.get_weather"'), [A]),
    ("muse", "two calls in a message", _MUSE.replace("</atem:function_calls>", '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>'), [A, NOW]),
    ("muse", "no header before a call", _MUSE.split("<|message|>")[1], [A]),
    ("muse", "a call in a message to nobody", f"<|message|>{_MUSE.split('<|message|>')[1]}", [A]),
    ("muse", "tags in content", f"{_TO.format('user')}Write <atem:invoke> so.<|eot|>", ["Write <atem:invoke> so."]),
    ("muse", "a tool of no one", f"{_S} to=rm<|message|>x<|eom|>", [f"{_S} to=rm<|message|>x<|eom|>"]),
    ("muse", "cut in a header", " to=se", [" to=se"]),
    ("muse", "cut in reasoning", f"{_TO.format('self')}hm, and", [Reasoning("hm, and")]),
    ("muse", "cut in a call's header", f"{_TO.format('self')}hm<|eom|>{_S} to=get_w", [Reasoning("hm"), f"{_S} to=get_w"]),
    ("muse", "cut in a string", _MUSE.split("A</")[0] + "Pa", [CUT]),
    ("muse", "cut in an end tag", _MUSE.split("A</")[0] + "Pa</atem:para", [CUT]),
]  # fmt: skip

LINES = (
    *(*DEEPSEEK, *KIMI, *MINIMAX_LINES, *MINICPM, *JAMBA, *HUNYUAN, *LING, *ERNIE, *OLMO, *APERTUS, *INTERN),
    *(*PLAMO, *COHERE, *FUNCTIONARY, *GIGACHAT, *TARS, *MUSE),
)

# family, reasoning, what, whether the prompt opened it, text, items
THINKING: list[tuple[str, str, str, bool, str, list[Item]]] = [
    ("deepseek_v4", "think", "before a call", True, f"hm</think>\n\n{deepseek_v4(W, ONE)}", [Reasoning("hm"), A]),
    ("deepseek_v4", "think", "never closed", True, f"hm\n\n{deepseek_v4(W, ONE)}", [Reasoning("hm"), A]),
    ("deepseek_v41", "think", "before text and a call", True, f"hm</think>Look.\n\n{deepseek_v41(W, ONE)}", [Reasoning("hm"), "Look.", A]),
    ("kimi_k3", "kimi_k3", "and content", True, "hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>", [Reasoning("hm"), "Yes."]),
    ("kimi_k3", "kimi_k3", "before a call", True, f"hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>{kimi_k3(W, ONE)}<|close|>message<|sep|>", [Reasoning("hm"), A]),
    ("kimi_k3", "kimi_k3", "that the model opened", False, f"<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Yes.{kimi_k3(W, ONE)}", [Reasoning("hm"), "Yes.", A]),
    ("kimi_k3", "kimi_k3", "never closed, content", True, "hm<|open|>response<|sep|>Yes.", [Reasoning("hm"), "Yes."]),
    ("kimi_k3", "kimi_k3", "never closed, a call", True, f"hm{kimi_k3(W, ONE)}", [Reasoning("hm"), A]),
    ("minimax_m3", "minimax_m3", "before a call", True, f"hm</mm:think>\n{minimax_m3(W, ONE)}", [Reasoning("hm"), A]),
    ("minimax_m3", "minimax_m3", "none", False, f"</mm:think>Look.{minimax_m3(W, ONE)}", ["Look.", A]),
    ("minimax_m3", "minimax_m3", "never closed", True, f"hm {minimax_m3(W, ONE)}", [Reasoning("hm"), A]),
    ("minicpm5", "think", "before a call", False, f"<think>\nhm\n</think>\n\n{minicpm5(W, ONE)}", [Reasoning("hm"), A]),
    ("hunyuan_a13b", "hunyuan", "and an answer", False, "<think>\nhm\n</think>\n<answer>\nYes.\n</answer>", [Reasoning("hm"), "Yes."]),
    ("hunyuan_a13b", "hunyuan", "before a call", False, f"<think>\nhm\n</think>\n<answer>\nLook.\n</answer>\n{hunyuan_a13b(W, ONE)}", [Reasoning("hm"), "Look.", A]),
    ("hunyuan_v3", "think", "before a call", True, f"hm</think>{hunyuan_v3(W, ONE)}", [Reasoning("hm"), A]),
    ("hunyuan_v3", "think", "never closed", True, f"hm{hunyuan_v3(W, ONE)}", [Reasoning("hm"), A]),
    ("ling3", "think", "before a call", True, f"hm\n</think>\nLook.\n{ling3(W, ONE)}", [Reasoning("hm"), "Look.", A]),
    ("ling3", "think", "never closed", True, f"hm\n{ling3(W, ONE)}<|role_end|>", [Reasoning("hm"), A]),
    ("jamba", "think", "before a call", True, f"hm</think>\n{jamba(W, ONE)}", [Reasoning("hm"), A]),
    ("jamba", "apriel", "and a response", True, "hm\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]", [Reasoning("hm"), "Yes."]),
    ("jamba", "apriel", "that ends with a call", False, f"Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\n{jamba(W, ONE)}", [Reasoning("hm"), A]),
    ("ernie45", "ernie45", "and a response", True, "hm\n</think>\n\n<response>\nYes.\n</response>\n", [Reasoning("hm"), "Yes."]),
    ("ernie45", "ernie45", "before a call", True, f"hm\n</think>\n\n\n{ernie45(W, ONE)}\n", [Reasoning("hm"), A]),
    ("olmo3", "think", "before a call", True, f"hm</think>\n\n{olmo3(W, ONE)}", [Reasoning("hm"), A]),
    ("apertus", "apertus", "before a call", False, f"<|inner_prefix|>hm<|inner_suffix|>{apertus(W, ONE)}", [Reasoning("hm"), A]),
    ("apertus", "apertus", "with a call in it", False, f"<|inner_prefix|>hm{apertus(W, ONE)}<|inner_suffix|>Yes.", [Reasoning("hm"), A, "Yes."]),
    ("internlm2", "think", "before a call", False, f"<think>hm</think>{internlm2(W, ONE)}", [Reasoning("hm"), A]),
    ("plamo3", "plamo3", "before a call", False, f"{_p('think', 'hm')}{plamo3(W, ONE)}<|plamo:tag|>", [Reasoning("hm"), A]),
    ("plamo3", "plamo3", "never closed", True, f"hm{plamo3(W, ONE)}", [Reasoning("hm"), A]),
    ("cohere", "cohere", "before a call", False, f"<|START_THINKING|>hm<|END_THINKING|>{cohere(W, ONE)}", [Reasoning("hm"), A]),
    ("cohere", "cohere", "and a response", True, "hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", [Reasoning("hm"), "Yes."]),
    ("cohere", "cohere", "and text", True, "hm<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", [Reasoning("hm"), "Yes."]),
    ("gigachat35", "think", "before a call", True, f"hm</think>{gigachat35(W, ONE)}", [Reasoning("hm"), A]),
    ("ui_tars", "ui_tars", "before an action", False, f"Thought: hm\n{ui_tars(W, ONE)}", [Reasoning("hm"), A]),
    ("ui_tars", "ui_tars", "before two actions", False, f"Thought: hm\n{ui_tars(W, ONE)}\n\nnow()", [Reasoning("hm"), A, NOW]),
    ("ui_tars", "ui_tars", "cut in the word behind it", False, "Thought: hm\nActi", [Reasoning("hm\nActi")]),
]  # fmt: skip
