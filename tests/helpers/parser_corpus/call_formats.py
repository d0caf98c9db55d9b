"""How the published templates of the other families write a call: one function a form.

Each takes a name and arguments, as a template would, and gives the text that the model is shown for it.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.parser_corpus import newer_formats
from tests.helpers.parser_corpus.writing import Write, bare, dump, python_call


def llama(name: str, arguments: dict[str, Any]) -> str:
    return f'{{"name": "{name}", "parameters": {dump(arguments)}}}'


def llama_tag(name: str, arguments: dict[str, Any]) -> str:
    return "<|python_tag|>" + llama(name, arguments)


def llama_function(name: str, arguments: dict[str, Any]) -> str:
    return f"<function={name}>{dump(arguments)}</function>"


def pythonic(name: str, arguments: dict[str, Any]) -> str:
    return f"[{python_call(name, arguments)}]"


def pythonic_json(name: str, arguments: dict[str, Any]) -> str:
    """With JSON's values, as LFM2's template has them."""
    return f"[{name}({','.join(f'{key}={dump(value)}' for key, value in arguments.items())})]"


def lfm2(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call_start|>{pythonic(name, arguments)}<|tool_call_end|>"


def llama4(name: str, arguments: dict[str, Any]) -> str:
    return f"<|python_start|>{pythonic(name, arguments)}<|python_end|>"


def mistral_old(name: str, arguments: dict[str, Any]) -> str:
    return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {dump(arguments)}, "id": "abcdef123"}}]'


def mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{dump(arguments)}"


def mistral_ids(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]{len(name):09d}[ARGS]{dump(arguments)}"


def mistral_bare(name: str, arguments: dict[str, Any]) -> str:
    """As it reads where `[ARGS]` was dropped as a special token."""
    return f"[TOOL_CALLS]{name}{dump(arguments)}"


def deepseek_v3(name: str, arguments: dict[str, Any]) -> str:
    call = f"function<｜tool▁sep｜>{name}\n```json\n{dump(arguments)}\n```"
    call = f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dump(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v32(name: str, arguments: dict[str, Any]) -> str:
    values = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{bare(value)}</｜DSML｜parameter>"
        for key, value in arguments.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{values}\n</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"


def _pairs(name: str, arguments: dict[str, Any], prefix: str, line: str) -> str:
    pairs = "".join(
        f"<{prefix}arg_key>{key}</{prefix}arg_key>{line}<{prefix}arg_value>{bare(value)}</{prefix}arg_value>{line}"
        for key, value in arguments.items()
    )
    return f"<{prefix}tool_call>{name}{line}{pairs}</{prefix}tool_call>"


def glm45(name: str, arguments: dict[str, Any]) -> str:
    return _pairs(name, arguments, "", "\n")


def glm47(name: str, arguments: dict[str, Any]) -> str:
    return _pairs(name, arguments, "", "")


def longcat(name: str, arguments: dict[str, Any]) -> str:
    return _pairs(name, arguments, "longcat_", "\n")


def longcat_flash(name: str, arguments: dict[str, Any]) -> str:
    call = f'{{"name": "{name}", "arguments": {dump(arguments)}}}'
    return f"<longcat_tool_call>\n{call}\n</longcat_tool_call>"


def kimi(name: str, arguments: dict[str, Any]) -> str:
    call = (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{dump(arguments)}<|tool_call_end|>"
    )
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def minimax(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in arguments.items()
    )
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{values}</invoke>\n</minimax:tool_call>'


def harmony(name: str, arguments: dict[str, Any]) -> str:
    """As the model writes it."""
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{dump(arguments)}<|call|>"


def harmony_template(name: str, arguments: dict[str, Any]) -> str:
    """As the template writes it into the history; a prompt ends before the space."""
    head = f"to=functions.{name}<|channel|>commentary json<|message|>"
    return f"{head}{dump(arguments)}<|call|>"


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return dump(value)


def gemma4(name: str, arguments: dict[str, Any]) -> str:
    quote = '<|"|>'
    return f"<|tool_call>call:{name}{_gemma(arguments, quote)}<tool_call|>"


def function_gemma(name: str, arguments: dict[str, Any]) -> str:
    return f"<start_function_call>call:{name}{_gemma(arguments, '<escape>')}<end_function_call>"


def _array(name: str, arguments: dict[str, Any]) -> str:
    return f'[{{"name": "{name}", "arguments": {dump(arguments)}}}]'


def granite(name: str, arguments: dict[str, Any]) -> str:
    return "<|tool_call|>" + _array(name, arguments)


def granite_plain(name: str, arguments: dict[str, Any]) -> str:
    return "<tool_call>" + _array(name, arguments)


def granite4(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{_array(name, arguments)[1:-1]}\n</tool_call>"


def granite_20b(name: str, arguments: dict[str, Any]) -> str:
    return "<function_call> " + _array(name, arguments)[1:-1]


def phi(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call|>{_array(name, arguments)}<|/tool_call|>"


def phi_functools(name: str, arguments: dict[str, Any]) -> str:
    return "functools" + _array(name, arguments)


def xlam(name: str, arguments: dict[str, Any]) -> str:
    return _array(name, arguments)


def xlam_fence(name: str, arguments: dict[str, Any]) -> str:
    return f"```json\n{_array(name, arguments)}\n```"


def step(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def step3(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f'<steptml:parameter name="{key}">{bare(value)}</steptml:parameter>'
        for key, value in arguments.items()
    )
    call = f'<steptml:invoke name="{name}">{values}</steptml:invoke>'
    head = "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    return f"{head}{call}<｜tool_call_end｜><｜tool_calls_end｜>"


# Family, whether calls of the form stand anywhere in the text, and the form.
FORMATS: dict[str, tuple[str, bool, Write]] = {
    "llama": ("llama", False, llama),
    "llama tag": ("llama", True, llama_tag),
    "llama function": ("llama", True, llama_function),
    "pythonic": ("pythonic", False, pythonic),
    "pythonic json": ("pythonic", False, pythonic_json),
    "lfm2": ("pythonic", True, lfm2),
    "llama4": ("pythonic", True, llama4),
    "mistral old": ("mistral_v3", True, mistral_old),
    "mistral": ("mistral", True, mistral),
    "mistral ids": ("mistral", True, mistral_ids),
    "mistral bare": ("mistral", True, mistral_bare),
    "deepseek v3": ("deepseek_v3", True, deepseek_v3),
    "deepseek v31": ("deepseek_v31", True, deepseek_v31),
    "deepseek v32": ("deepseek_v32", True, deepseek_v32),
    "glm45": ("glm", True, glm45),
    "glm47": ("glm", True, glm47),
    "longcat": ("longcat", True, longcat),
    "longcat flash": ("longcat", True, longcat_flash),
    "kimi": ("kimi_k2", True, kimi),
    "minimax": ("minimax_m2", True, minimax),
    "harmony": ("harmony", True, harmony),
    "harmony template": ("harmony", False, harmony_template),
    "gemma4": ("gemma4", True, gemma4),
    "function gemma": ("function_gemma", True, function_gemma),
    "granite": ("granite", True, granite),
    "granite plain": ("granite", True, granite_plain),
    "granite4": ("granite", True, granite4),
    "granite 20b": ("granite", True, granite_20b),
    "phi": ("phi4_mini", True, phi),
    "phi functools": ("phi4_mini", True, phi_functools),
    "xlam": ("xlam", False, xlam),
    "xlam fence": ("xlam", False, xlam_fence),
    "step": ("step", True, step),
    "step3": ("step", True, step3),
    **newer_formats.FORMATS,
}
