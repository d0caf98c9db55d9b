"""How the templates and the encoders of newer families write a call: more forms of `call_formats.FORMATS`."""

from __future__ import annotations

from typing import Any

from tests.helpers.parser_corpus.writing import Write, bare, dump, python_call


def _invoke(name: str, arguments: dict[str, Any], prefix: str, typed: bool = True) -> str:
    """Tags with names as attributes, which may say of each value whether it is a string."""

    def kind(value: Any) -> str:
        return f' string="{"true" if isinstance(value, str) else "false"}"' if typed else ""

    values = "".join(
        f'<{prefix}parameter name="{key}"{kind(value)}>{bare(value)}</{prefix}parameter>\n'
        for key, value in arguments.items()
    )
    return f'<{prefix}invoke name="{name}">\n{values}</{prefix}invoke>'


def deepseek_v4(name: str, arguments: dict[str, Any]) -> str:
    call = _invoke(name, arguments, "｜DSML｜")
    return f"<｜DSML｜tool_calls>\n{call}\n</｜DSML｜tool_calls>"


def deepseek_v4_json(name: str, arguments: dict[str, Any]) -> str:
    """All arguments in one object, as models write it too."""
    call = f'<｜DSML｜invoke name="{name}">\n{dump(arguments)}\n</｜DSML｜invoke>'
    return f"<｜DSML｜tool_calls>\n{call}\n</｜DSML｜tool_calls>"


def deepseek_v41(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜DSML｜ calls>\n{_invoke(name, arguments, '｜DSML｜ ')}\n</｜DSML｜ calls>"


def gigachat35(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜GCML｜tool_calls>\n{_invoke(name, arguments, '｜GCML｜')}\n</｜GCML｜tool_calls>"


def gigachat3(name: str, arguments: dict[str, Any]) -> str:
    return f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_object(name, arguments)}"


def gigachat31(name: str, arguments: dict[str, Any]) -> str:
    return f"<|function_call|>{_object(name, arguments)}"


def _kimi_type(value: Any) -> str:
    names = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "number")


def kimi_k3(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f'<|open|>argument key="{key}" type="{_kimi_type(value)}"<|sep|>{bare(value)}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return _kimi_call(name, values)


def kimi_k3_json(name: str, arguments: dict[str, Any]) -> str:
    """All arguments in one element, which is the form of arguments that are no object's members."""
    return _kimi_call(name, f'<|open|>json type="object"<|sep|>{dump(arguments)}<|close|>json<|sep|>')


def _kimi_call(name: str, inner: str) -> str:
    call = f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


MINIMAX = "]<]minimax[>["


def _element(value: Any) -> str:
    """A value with a tag for each member. What is null is left out."""
    if isinstance(value, dict):
        return "".join(
            f"{MINIMAX}<{key}>{_element(item)}{MINIMAX}</{key}>"
            for key, item in value.items()
            if item is not None
        )
    if isinstance(value, list):
        return "".join(f"{MINIMAX}<item>{_element(item)}{MINIMAX}</item>" for item in value)
    return bare(value)


def minimax_m3(name: str, arguments: dict[str, Any]) -> str:
    call = f'{MINIMAX}<invoke name="{name}">{_element(arguments)}{MINIMAX}</invoke>'
    return f"{MINIMAX}<tool_call>\n{call}\n{MINIMAX}</tool_call>"


def minicpm5(name: str, arguments: dict[str, Any]) -> str:
    def write(value: Any) -> str:
        text = value if isinstance(value, str) else repr(value)
        return f"<![CDATA[{text}]]>" if any(char in text for char in "<&\n") else text

    values = "".join(f'<param name="{key}">{write(value)}</param>' for key, value in arguments.items())
    return f'<function name="{name}">{values}</function>'


def _object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {dump(arguments)}}}'


def jamba(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_calls>[{_object(name, arguments)}]</tool_calls>"


def minimax_m1(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_calls>\n{_object(name, arguments)}\n</tool_calls>"


def hunyuan_a13b(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_calls><tool_call>{name}\n```json\n{dump(arguments)}\n```</tool_call></tool_calls>"


def hunyuan_v3(name: str, arguments: dict[str, Any], suffix: str = "") -> str:
    s = suffix
    pairs = "".join(
        f"<arg_key{s}>{key}</arg_key{s}>\n<arg_value{s}>{bare(value)}</arg_value{s}>\n"
        for key, value in arguments.items()
    )
    call = f"<tool_call{s}>{name}<tool_sep{s}>\n{pairs}</tool_call{s}>"
    return f"<tool_calls{s}>\n{call}\n</tool_calls{s}>"


def hunyuan_v4(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{bare(value)}</arg_value>" for key, value in arguments.items()
    )
    return f"<tool_calls><tool_call>{name}{pairs}</tool_call></tool_calls>"


def ling3(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def ernie45(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{_object(name, arguments)}\n</tool_call>"


def olmo3(name: str, arguments: dict[str, Any]) -> str:
    """With JSON's values, as the template has them."""
    values = ", ".join(f"{key}={dump(value)}" for key, value in arguments.items())
    return f"<function_calls>{name}({values})</function_calls>"


def olmo3_python(name: str, arguments: dict[str, Any]) -> str:
    return f"<function_calls>{python_call(name, arguments)}</function_calls>"


def apertus(name: str, arguments: dict[str, Any]) -> str:
    return f'<|tools_prefix|>[{{"{name}": {dump(arguments)}}}]<|tools_suffix|>'


def internlm2(name: str, arguments: dict[str, Any]) -> str:
    return f"<|action_start|><|plugin|>\n{_object(name, arguments, 'parameters')}<|action_end|>"


def _plamo(name: str, inner: str) -> str:
    return f"<|plamo:begin_{name}:plamo|>{inner}<|plamo:end_{name}:plamo|>"


def plamo3(name: str, arguments: dict[str, Any]) -> str:
    inner = f"<|plamo:constrain|>json<|plamo:msg|>{dump(arguments)}"
    call = _plamo("tool_request", _plamo("tool_name", name) + _plamo("tool_arguments", inner))
    return _plamo("tool_requests", call)


def cohere(name: str, arguments: dict[str, Any]) -> str:
    call = f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {dump(arguments)}}}'
    return f"<|START_ACTION|>[\n    {call}\n]<|END_ACTION|>"


def command_r(name: str, arguments: dict[str, Any]) -> str:
    call = f'    {{\n        "tool_name": "{name}",\n        "parameters": {dump(arguments)}\n    }}'
    return f"Action:```json\n[\n{call}\n]```"


def functionary(name: str, arguments: dict[str, Any]) -> str:
    """With what the prompt ends with."""
    return f">>>{name}\n{dump(arguments)}"


def functionary_v2(name: str, arguments: dict[str, Any]) -> str:
    return f"<|from|>assistant\n<|recipient|>{name}\n<|content|>{dump(arguments)}<|stop|>"


def functionary_v25(name: str, arguments: dict[str, Any]) -> str:
    return f"<|reserved_special_token_249|>{name}\n{dump(arguments)}"


def functionary_v31(name: str, arguments: dict[str, Any]) -> str:
    return f"<function={name}>{dump(arguments)}</function>"


def ui_tars(name: str, arguments: dict[str, Any]) -> str:
    return f"Action: {python_call(name, arguments)}"


def muse(name: str, arguments: dict[str, Any]) -> str:
    """With what the prompt ends with."""
    call = _invoke(name, arguments, "atem:", typed=False)
    block = f"<atem:function_calls>\n{call}\n</atem:function_calls>"
    return f"<|start|>assistant to={name}<|message|>{block}<|eom|>"


FORMATS: dict[str, tuple[str, bool, Write]] = {
    "deepseek v4": ("deepseek_v4", True, deepseek_v4),
    "deepseek v4 json": ("deepseek_v4", True, deepseek_v4_json),
    "deepseek v41": ("deepseek_v41", True, deepseek_v41),
    "gigachat3": ("gigachat3", True, gigachat3),
    "gigachat31": ("gigachat31", True, gigachat31),
    "gigachat35": ("gigachat35", True, gigachat35),
    "kimi k3": ("kimi_k3", True, kimi_k3),
    "kimi k3 json": ("kimi_k3", True, kimi_k3_json),
    "minimax m3": ("minimax_m3", True, minimax_m3),
    "minicpm5": ("minicpm5", True, minicpm5),
    "jamba": ("jamba", True, jamba),
    "minimax m1": ("jamba", True, minimax_m1),
    "hunyuan a13b": ("hunyuan_a13b", True, hunyuan_a13b),
    "hunyuan a13b array": ("hunyuan_a13b", True, jamba),
    "hunyuan v3": ("hunyuan_v3", True, hunyuan_v3),
    "hunyuan v4": ("hunyuan_v3", True, hunyuan_v4),
    "ling3": ("ling3", True, ling3),
    "ernie45": ("ernie45", True, ernie45),
    "olmo3": ("olmo3", True, olmo3),
    "olmo3 python": ("olmo3", True, olmo3_python),
    "apertus": ("apertus", True, apertus),
    "internlm2": ("internlm2", True, internlm2),
    "plamo3": ("plamo3", True, plamo3),
    "cohere": ("cohere", True, cohere),
    "command r": ("command_r", True, command_r),
    "functionary": ("functionary", True, functionary),
    "functionary v2": ("functionary_v2", True, functionary_v2),
    "functionary v25": ("functionary_v25", True, functionary_v25),
    "functionary v31": ("functionary_v31", True, functionary_v31),
    "ui tars": ("ui_tars", False, ui_tars),
    "muse": ("muse", True, muse),
}
# Values that a form does not tell from others: null is no element, and without types all leaves are guessed.
LOST_VALUES: dict[str, set[str]] = {"minimax m3": {"null", "nullable", "object"}}
