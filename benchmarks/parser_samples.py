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
_GCML = _DSML.replace("DSML", "GCML")
_ATEM = _VALUES.replace("parameter", "atem:parameter")
_KIMI_K3 = "".join(
    f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
    for key, value in (("path", "a.txt"), ("text", "$"))
)
_M3 = "]<]minimax[>["
_M3_CALL = f'{_M3}<invoke name="save">{_M3}<path>a.txt{_M3}</path>{_M3}<text>${_M3}</text>{_M3}</invoke>'
# The calls that are no JSON, or that models seldom write so: other families' records have theirs.
_TAGGED: dict[str, str] = {
    "gemma4": '<|tool_call>call:save{path:<|"|>a.txt<|"|>,text:<|"|>$<|"|>}<tool_call|>',
    "function_gemma": f"<start_function_call>call:save{_ESCAPED}<end_function_call>",
    "deepseek_v32": f"<｜DSML｜function_calls>\n{_DSML}\n</｜DSML｜function_calls>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="save">\n{_VALUES}</invoke>\n</minimax:tool_call>',
    "longcat": f"<longcat_tool_call>save\n{_KEYS.replace('#', 'longcat_')}</longcat_tool_call>",
    "glm": f"<tool_call>save\n{_KEYS.replace('#', '')}</tool_call>",
    "step": f"<tool_call>\n{_XML}</tool_call>",
    "pythonic": '[save(path="a.txt", text="$")]',
    "seed_oss": f"<seed:tool_call>\n{_XML}</seed:tool_call>",
    "qwen3_coder": f"<tool_call>\n{_XML}</tool_call>",
    "muse": f' to=save<|message|><atem:function_calls>\n<atem:invoke name="save">\n{_ATEM}</atem:invoke>\n'
    "</atem:function_calls><|eom|>",
    "deepseek_v41": f"<｜DSML｜ calls>\n{_DSML.replace('DSML｜', 'DSML｜ ')}\n</｜DSML｜ calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{_DSML}\n</｜DSML｜tool_calls>",
    "kimi_k3": f'<|open|>tools<|sep|><|open|>call tool="save" index="1"<|sep|>{_KIMI_K3}<|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "minimax_m3": f"{_M3}<tool_call>\n{_M3_CALL}\n{_M3}</tool_call>",
    "gigachat35": f"<｜GCML｜tool_calls>\n{_GCML}\n</｜GCML｜tool_calls>",
    "hunyuan_v3": f"<tool_calls>\n<tool_call>save<tool_sep>\n{_KEYS.replace('#', '')}</tool_call>\n"
    "</tool_calls>",
    "minicpm5": '<function name="save"><param name="path">a.txt</param>'
    '<param name="text">$</param></function>',
    "olmo3": '<function_calls>save(path="a.txt", text="$")</function_calls>',
    "ling3": f"<tool_call>save\n{_KEYS.replace('#', '')}</tool_call>",
    "ui_tars": 'Action: save(path="a.txt", text="$")',
}
CALLS: dict[str, str] = {
    family.name: _JSON.join(around)
    for family in TOOL_CALL_FAMILIES
    if (around := family.get_call_prefix_suffix("save")) is not None
} | _TAGGED


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
