"""The formats of tool calls, in the order in which `auto` tries them: special ones before general ones.

A format that an existing reader reads is a record here. If a family needs a reader of its own, reader and
record are in the module for its kind of call.
"""

from __future__ import annotations

import re

from mlxrun.api.parsers.families import (
    call_elements,
    gemma,
    hermes,
    json_objects,
    message_formats,
    named_calls,
    python_calls,
)
from mlxrun.api.parsers.families.reasoning import COHERE_CONTENT, find_suffix
from mlxrun.api.parsers.family import ToolCallFamily, any_of, in_template, is_shown
from mlxrun.api.parsers.readers.json_call import BARE, make_json_family, read_bare
from mlxrun.api.parsers.readers.tagged_arguments import PairTags, make_invoke_family, make_pair_family

# DeepSeek's tags for calls, `<｜DSML｜invoke name="f">`. V4.1's names begin with a space. The block around
# calls differs by version; those of all versions are ignored. The formats are those of `encoding_dsv4.py` and
# its successor, which come with the models.
_DSML = "｜DSML｜"
_DSML_BLOCKS = tuple(
    f"<{slash}{_DSML}{name}>" for name in ("tool_calls", " calls", "function_calls") for slash in ("", "/")
)
_SPACED = re.compile(rf"""(?:{_DSML}|['"]) (?:calls>|invoke name=)""")
# Tokens that came with a version, by which a model is known whose template has no tools.
_NEW_TOKENS = {"4.1": "<｜System｜>", "4": "<｜latest_reminder｜>"}
_GIGACHAT = {"function call<|role_sep|>": "", "<|function_call|>": ""}
_GIGACHAT_MARKERS = ("<|role_sep|>", "<|message_sep|>", "<|function_call|>")
_GCML_BLOCK = ("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>")
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_LONGCAT, _GLM = PairTags("longcat_"), PairTags()


def _find_dsml_version(template: str, tokens: frozenset[str]) -> str:
    """Find the version of DeepSeek whose tags a model writes: "3.2", "4" or "4.1"; "" if it writes none."""
    if _DSML in template:
        return "4.1" if _SPACED.search(template) else "4" if "tool_calls>" in template else "3.2"
    if _DSML in tokens:
        return next((version for version, token in _NEW_TOKENS.items() if token in tokens), "3.2")
    return ""


def _write_call(prefix: str, block: str) -> str:
    """A call with the arguments as JSON, which the tags may hold in place of parameters."""
    return (
        f'<{prefix}{block}>\n<{prefix}invoke name="$name">\n$arguments\n</{prefix}invoke>\n</{prefix}{block}>'
    )


def _make_dsml(name: str, version: str, prefix: str, block: str, *aliases: str) -> ToolCallFamily:
    """Make the family of one version of DeepSeek, which writes this prefix and block. V4 and later also write
    the other prefix."""
    return make_invoke_family(
        name,
        _DSML_BLOCKS,
        *((_DSML,) if version == "3.2" else (_DSML, f"{_DSML} ")),
        aliases=aliases,
        detect=lambda template, tokens: _find_dsml_version(template, tokens) == version,
        ends_reasoning=True,
        call=f"\n\n{_write_call(prefix, block)}",
    )


def _is_cohere(template: str, tokens: frozenset[str]) -> bool:
    start = "<|START_ACTION|>"
    return start in template or (start in tokens and '"tool_name"' not in template)


def _is_hunyuan_v3(template: str, tokens: frozenset[str]) -> bool:
    tags = ("<tool_calls", "<arg_key")
    return in_template(*tags)(template, tokens) or all(any(t.startswith(tag) for t in tokens) for tag in tags)


def _is_jamba(template: str, tokens: frozenset[str]) -> bool:
    """Whether the tag occurs, and no call of Hunyuan's in it."""
    start, others = "<tool_calls>", ("```json", "<arg_key", "<tool_call>")
    return (start in template and not any(text in template for text in others[:2])) or (
        start in tokens and not any(text in tokens or text in template for text in others)
    )


def _make_hunyuan(suffix: str = "") -> ToolCallFamily:
    """Make the family of one model, whose tags have a suffix: Hy3 and Hy4 write GLM's tags in a block, Hy3
    with `<tool_sep>` behind the name."""
    separator = f"<tool_sep{suffix}>"
    tags = PairTags(suffix=suffix, separators=(separator,))
    block = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")
    return make_pair_family(
        "hunyuan_v3",
        tags,
        aliases=("hunyuan", "hy_v3", "hy_v4"),
        detect=_is_hunyuan_v3,
        ignored=block,
        markers=(*tags.markers, separator, *block),
        adapt=lambda tokens: _make_hunyuan(find_suffix(tokens)),
    )


TOOL_CALL_FAMILIES: tuple[ToolCallFamily, ...] = (
    message_formats.HARMONY,
    message_formats.MUSE,
    gemma.GEMMA4,
    gemma.FUNCTION_GEMMA,
    _make_dsml("deepseek_v41", "4.1", f"{_DSML} ", "calls", "deepseek_v4_1"),
    _make_dsml("deepseek_v4", "4", _DSML, "tool_calls"),
    _make_dsml("deepseek_v32", "3.2", _DSML, "function_calls", "deepseek_v3_2"),
    named_calls.DEEPSEEK_V3,
    named_calls.DEEPSEEK_V31,
    call_elements.KIMI_K3,
    named_calls.KIMI_K2,
    call_elements.MINIMAX_M3,
    make_invoke_family(
        "minimax_m2", _MINIMAX, "", aliases=("minimax",), detect=in_template("<minimax:tool_call>")
    ),
    make_invoke_family(
        "gigachat35",
        _GCML_BLOCK,
        "｜GCML｜",
        aliases=("gigachat3_5",),
        detect=is_shown("｜GCML｜"),
        ignored=(*_GCML_BLOCK, "<|message_sep|>"),
        ends_reasoning=True,
        markers=("｜GCML｜", *_GCML_BLOCK, "<|message_sep|>"),
        call=_write_call("｜GCML｜", "tool_calls"),
    ),
    make_json_family(
        "gigachat31",
        _GIGACHAT,
        aliases=("gigachat3_1",),
        detect=in_template("<|role_sep|>", "<|function_call|>", without=("｜GCML｜",)),
        ignored=("<|message_sep|>",),
        ends_reasoning=True,
        markers=_GIGACHAT_MARKERS,
        call='<|function_call|>{"name": $json_name, "arguments": $arguments}',
    ),
    make_json_family(
        "gigachat3",
        _GIGACHAT,
        aliases=("gigachat3_0",),
        detect=in_template("<|role_sep|>", without=("｜GCML｜", "<|function_call|>")),
        ignored=("<|message_sep|>",),
        ends_reasoning=True,
        markers=_GIGACHAT_MARKERS,
        call='<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": $json_name, "arguments": $arguments}',
    ),
    named_calls.PLAMO3,
    json_objects.APERTUS,
    make_json_family(
        "internlm2",
        {"<|action_start|>": "<|action_end|>"},
        behind=("<|plugin|>",),  # what stands behind `<|interpreter|>` is code, and content
        aliases=("internlm", "intern_s1"),
        detect=is_shown("<|action_start|>"),
        ends_reasoning=True,
        markers=("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|interpreter|>"),
        call='<|action_start|><|plugin|>\n{"name": $json_name, "parameters": $arguments}<|action_end|>',
    ),
    # The ids count the calls of a conversation, and the template counts them again, so they are not used:
    # calls of two answers may have the same.
    make_json_family(
        "cohere",
        {"<|START_ACTION|>": "<|END_ACTION|>"},
        aliases=("command_a", "command_r7b", "cohere_command3", "cohere_command4"),
        detect=_is_cohere,
        ignored=COHERE_CONTENT,
        ends_reasoning=True,
        markers=("<|START_ACTION|>", "<|END_ACTION|>", *COHERE_CONTENT),
        call='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": $json_name, "parameters": $arguments}'
        "\n]<|END_ACTION|>",
    ),
    make_json_family(
        "command_r",
        {"Action:": "```"},
        behind=("```json", "```"),
        aliases=("command_r_plus",),
        detect=in_template("Action:", '"tool_name"', without=("<|START_ACTION|>",)),
        ends=(),
        markers=(),
        call='Action:\n```json\n[\n    {"tool_name": $json_name, "parameters": $arguments}\n]```',
    ),
    message_formats.FUNCTIONARY_V2,
    named_calls.FUNCTIONARY_V25,
    message_formats.FUNCTIONARY,
    named_calls.FUNCTIONARY_V31,
    make_pair_family(
        "longcat", _LONGCAT, aliases=("longcat_flash",), detect=in_template("<longcat_tool_call>")
    ),
    _make_hunyuan(),
    named_calls.HUNYUAN_A13B,
    make_json_family(
        "jamba",
        {"<tool_calls>": "</tool_calls>"},  # MiniMax M1 writes the objects one a line, without an array
        aliases=("apriel", "minimax_m1"),
        detect=_is_jamba,
        call='<tool_calls>[{"name": $json_name, "arguments": $arguments}]</tool_calls>',
    ),
    make_pair_family(
        "ling3",
        _GLM,
        aliases=("bailing_v3",),
        detect=in_template("<arg_key>", "<|role_end|>", without=("<tool_calls",)),
        ignored=("<|role_end|>",),  # the end of its turn, which it sometimes writes as text
        markers=(*_GLM.markers, "<|role_end|>"),
    ),
    make_pair_family(
        "glm",
        _GLM,
        aliases=("glm45", "glm4_moe", "glm47", "laguna"),
        detect=in_template("<arg_key>", without=("<tool_calls",)),  # Hunyuan writes these tags within a block
    ),
    named_calls.MISTRAL_V3,
    named_calls.MISTRAL,
    # Granite 3.1 writes `<tool_call>` as plain text, Granite 4 Hermes' tags around one object a call, and
    # Granite 20b `<function_call>`.
    make_json_family(
        "granite",
        {
            "<|tool_call|>": "<|/tool_call|>",
            "<tool_call>": "</tool_call>",
            "<function_call>": "</function_call>",
        },
        repeats=True,
        aliases=("granite_20b_fc",),
        detect=any_of(
            in_template("<|start_of_role|>", "<|tool_call|>"),
            in_template("<|function_call_library|>"),
            in_template("<function_call>"),
        ),
        bare=BARE,
        read_bare=read_bare,
        markers=("<|tool_call|>", "<tool_call>", "</tool_call>", "<function_call>"),
        call='<|tool_call|>[{"name": $json_name, "arguments": $arguments}]',
    ),
    json_objects.PHI4_MINI,
    json_objects.XLAM,
    hermes.STEP,
    call_elements.MINICPM5,
    python_calls.OLMO3,
    python_calls.PYTHONIC,
    python_calls.LLAMA,
    hermes.SEED_OSS,
    hermes.QWEN3_CODER,
    hermes.ERNIE45,
    hermes.HERMES,
    # These recognize no template. `auto` takes the last where no other family matches.
    python_calls.UI_TARS,
    json_objects.PLAIN_JSON,
)
