"""A call of `save` in every family's format, for `python -m benchmarks parsers`; `$` stands for the text."""

from __future__ import annotations

from typing import Any

from mlxrun.api.parsers.registry import REASONING_FAMILIES, TOOL_CALL_FAMILIES, find_reasoning_family

WORDS = "The quick brown fox jumps over the lazy dog, and then it rests a while near the river. "
TEXT = WORDS * 6

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "save",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            },
        },
    }
]

_JSON = '{"path": "a.txt", "text": "$"}'
_CALL = f'{{"name": "save", "arguments": {_JSON}}}'
_XML = (
    "<function=save>\n<parameter=path>\na.txt\n</parameter>\n<parameter=text>\n$\n</parameter>\n</function>\n"
)
_KEYS = (
    "<#arg_key>path</#arg_key>\n<#arg_value>a.txt</#arg_value>\n"
    "<#arg_key>text</#arg_key>\n<#arg_value>$</#arg_value>\n"
)
_VALUES = '<parameter name="path">a.txt</parameter>\n<parameter name="text">$</parameter>\n'
_DSML = f'<｜DSML｜invoke name="save">\n{_VALUES.replace("parameter", "｜DSML｜parameter")}</｜DSML｜invoke>'
_ESCAPED = "{path:<escape>a.txt<escape>,text:<escape>$<escape>}"
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>#<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_GCML = _DSML.replace("DSML", "GCML")
_ATEM = _VALUES.replace("parameter", "atem:parameter")
_KIMI_K3 = "".join(
    f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
    for key, value in (("path", "a.txt"), ("text", "$"))
)
_PLAMO = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>save<|plamo:end_tool_name:plamo|>"
    f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{_JSON}"
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
)
_M3 = "]<]minimax[>["
_M3_CALL = f'{_M3}<invoke name="save">{_M3}<path>a.txt{_M3}</path>{_M3}<text>${_M3}</text>{_M3}</invoke>'
_KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.save:0<|tool_call_argument_begin|>"

CALLS: dict[str, str] = {
    "harmony": f"<|channel|>commentary to=functions.save <|constrain|>json<|message|>{_JSON}<|call|>",
    "gemma4": '<|tool_call>call:save{path:<|"|>a.txt<|"|>,text:<|"|>$<|"|>}<tool_call|>',
    "function_gemma": f"<start_function_call>call:save{_ESCAPED}<end_function_call>",
    "deepseek_v32": f"<｜DSML｜function_calls>\n{_DSML}\n</｜DSML｜function_calls>",
    "deepseek_v3": _DEEPSEEK.replace("#", f"function<｜tool▁sep｜>save\n```json\n{_JSON}\n```"),
    "deepseek_v31": _DEEPSEEK.replace("#", f"save<｜tool▁sep｜>{_JSON}"),
    "kimi_k2": f"{_KIMI}{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="save">\n{_VALUES}</invoke>\n</minimax:tool_call>',
    "longcat": f"<longcat_tool_call>save\n{_KEYS.replace('#', 'longcat_')}</longcat_tool_call>",
    "glm": f"<tool_call>save\n{_KEYS.replace('#', '')}</tool_call>",
    "mistral_v3": f"[TOOL_CALLS] [{_CALL}]",
    "mistral": f"[TOOL_CALLS]save[ARGS]{_JSON}",
    "granite": f"<|tool_call|>[{_CALL}]",
    "phi4_mini": f"<|tool_call|>[{_CALL}]<|/tool_call|>",
    "xlam": f"[{_CALL}]",
    "step": f"<tool_call>\n{_XML}</tool_call>",
    "pythonic": '[save(path="a.txt", text="$")]',
    "llama": f'{{"name": "save", "parameters": {_JSON}}}',
    "seed_oss": f"<seed:tool_call>\n{_XML}</seed:tool_call>",
    "qwen3_coder": f"<tool_call>\n{_XML}</tool_call>",
    "hermes": f"<tool_call>\n{_CALL}\n</tool_call>",
    "muse": f' to=save<|message|><atem:function_calls>\n<atem:invoke name="save">\n{_ATEM}</atem:invoke>\n'
    "</atem:function_calls><|eom|>",
    "deepseek_v41": f"<｜DSML｜ calls>\n{_DSML.replace('DSML｜', 'DSML｜ ')}\n</｜DSML｜ calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{_DSML}\n</｜DSML｜tool_calls>",
    "kimi_k3": f'<|open|>tools<|sep|><|open|>call tool="save" index="1"<|sep|>{_KIMI_K3}<|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "minimax_m3": f"{_M3}<tool_call>\n{_M3_CALL}\n{_M3}</tool_call>",
    "gigachat35": f"<｜GCML｜tool_calls>\n{_GCML}\n</｜GCML｜tool_calls>",
    "gigachat31": f"<|function_call|>{_CALL}",
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_CALL}",
    "plamo3": f"<|plamo:begin_tool_requests:plamo|>{_PLAMO}<|plamo:end_tool_requests:plamo|>",
    "apertus": f'<|tools_prefix|>[{{"save": {_JSON}}}]<|tools_suffix|>',
    "internlm2": f"<|action_start|><|plugin|>\n{_CALL}<|action_end|>",
    "cohere": f'<|START_ACTION|>[\n    {{"tool_name": "save", "parameters": {_JSON}}}\n]<|END_ACTION|>',
    "command_r": f'Action:```json\n[\n{{"tool_name": "save", "parameters": {_JSON}}}\n]```',
    "functionary_v2": f"save\n<|content|>{_JSON}<|stop|>",
    "functionary_v25": f"<|reserved_special_token_249|>save\n{_JSON}",
    "functionary": f"save\n{_JSON}",
    "functionary_v31": f"<function=save>{_JSON}</function>",
    "hunyuan_v3": f"<tool_calls>\n<tool_call>save<tool_sep>\n{_KEYS.replace('#', '')}</tool_call>\n"
    "</tool_calls>",
    "hunyuan_a13b": f"<tool_calls><tool_call>save\n```json\n{_JSON}\n```</tool_call></tool_calls>",
    "jamba": f"<tool_calls>[{_CALL}]</tool_calls>",
    "minicpm5": '<function name="save"><param name="path">a.txt</param>'
    '<param name="text">$</param></function>',
    "olmo3": '<function_calls>save(path="a.txt", text="$")</function_calls>',
    "ling3": f"<tool_call>save\n{_KEYS.replace('#', '')}</tool_call>",
    "ernie45": f"<tool_call>\n{_CALL}\n</tool_call>",
    "ui_tars": 'Action: save(path="a.txt", text="$")',
    "json": _CALL,
}


def make_call(family: str) -> str:
    """Make a call with about half a kilobyte of arguments."""
    return CALLS[family].replace("$", TEXT)


def make_reasoning(family: str) -> str:
    """Make about half a kilobyte of reasoning."""
    opener, closers = find_reasoning_family(family).pairs[0]
    return f"{opener}\n{TEXT}\n{closers[0]}\n"


def list_parsers() -> list[tuple[str, str]]:
    """List every parser: "tools" or "reasoning", and its name."""
    tools = [("tools", family.name) for family in TOOL_CALL_FAMILIES]
    return tools + [("reasoning", family.name) for family in REASONING_FAMILIES]
