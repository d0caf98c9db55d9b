"""How a model's formats are chosen, the documented list of them, and calls that mlx-lm reads too."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from mlx_lm.tool_parsers import json_tools
from mlx_lm.tool_parsers import qwen3_coder as upstream_coder

from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.registry import (
    REASONING_FAMILIES,
    TOOL_CALL_FAMILIES,
    choose_formats,
    find_reasoning_family,
    find_tool_call_family,
)
from mlxrun.core.errors import ConfigError
from tests.helpers.parser_corpus.core import CASES
from tests.helpers.parser_driver import TOOLS, Call, Case

# -- against mlx-lm ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "case"),
    [
        (module, case)
        for family, module in (("hermes", json_tools), ("qwen3_coder", upstream_coder))
        for case in CASES
        if case.well_formed and case.family == family
    ],
    ids=lambda value: value.id if isinstance(value, Case) else "",
)
def test_as_mlx_lm(module: ModuleType, case: Case) -> None:
    """Well-formed calls are what mlx-lm's parser makes of them; where not, its arguments break the schema."""
    inner = case.text.split(module.tool_call_start, 1)[1].rsplit(module.tool_call_end, 1)[0].strip()
    theirs = module.parse_tool_call(inner, TOOLS)
    (ours,) = case.expected
    assert isinstance(ours, Call)
    if theirs != {"name": ours.name, "arguments": ours.arguments}:
        schema = next(t["function"] for t in TOOLS if t["function"]["name"] == ours.name)["parameters"]
        jsonschema.validate(ours.arguments, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(theirs["arguments"], schema)


# -- choosing ---------------------------------------------------------------------------------------

HERMES = """{{ tools }}For each function call, return a json object within <tool_call></tool_call> XML tags:
{"name": <function-name>, "arguments": <args-json-object>}{{- '<tool_call>\\n{"name": "' }}"""
CODER = "{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' + args_name + '>\\n' }}"
SEED = "{{ '<seed:tool_call>\\n<function=' }}<seed:think>"


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "reasoning"),
    [
        (HERMES, [], "hermes", None),
        (HERMES + "<think>", [], "hermes", "think"),
        (HERMES, ["<think>", "</think>"], "hermes", "think"),
        (CODER, ["<tool_call>"], "qwen3_coder", None),
        (CODER + "<think>\\n", [], "qwen3_coder", "think"),
        (SEED, [], "seed_oss", "seed_oss"),
        ("{{ messages }}", [], "json", None),
        (None, [], "json", None),
        ("{{ messages }}", ["[THINK]"], "json", "mistral"),
        ("Here is my thought process: Here is my response:", [], "json", "granite"),
    ],
)
def test_auto(template: str | None, tokens: list[str], tools: str, reasoning: str | None) -> None:
    chosen = choose_formats(template, tokens)
    assert chosen.tool_calls is find_tool_call_family(tools)
    assert chosen.reasoning is (find_reasoning_family(reasoning) if reasoning else None)


@pytest.mark.parametrize("excerpt", [HERMES, CODER, SEED])
def test_a_template_is_known_by_one_family(excerpt: str) -> None:
    assert len([f.name for f in TOOL_CALL_FAMILIES if f.detect(excerpt, frozenset())]) == 1


def test_names() -> None:
    assert choose_formats(HERMES, [], tools="none", reasoning="none") == ModelFormats()
    assert choose_formats(None, [], tools="qwen3_xml", reasoning="deepseek_r1") == ModelFormats(
        find_tool_call_family("qwen3_coder"), find_reasoning_family("think")
    )
    for records in (TOOL_CALL_FAMILIES, REASONING_FAMILIES):
        every = ["auto", "none", *(name for record in records for name in (record.name, *record.aliases))]
        assert len(set(every)) == len(every)


def test_the_page_lists_every_format() -> None:
    """docs/tools.md, in the order in which `auto` asks."""
    text = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    for records, title in (
        (TOOL_CALL_FAMILIES, "## Formats of tool calls"),
        (REASONING_FAMILIES, "## Formats of reasoning"),
    ):
        rows = re.findall(r"^\| `(\w+)` \|", text.split(title)[1].split("\n## ")[0], re.MULTILINE)
        assert rows == [record.name for record in records]
    for records, title in (
        (TOOL_CALL_FAMILIES, "Other names of tool calls"),
        (REASONING_FAMILIES, "Other names of reasoning"),
    ):
        line = re.search(rf"^{title}: (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
        assert line is not None
        listed = dict(re.findall(r"`(\w+)`\s\(([^)]*)\)", line[1]))
        known = {each.name: each.aliases for each in records if each.aliases}
        assert {name: tuple(re.findall(r"`(\w+)`", more)) for name, more in listed.items()} == known


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"'hermess' is not the name .* \(did you mean 'hermes'"):
        choose_formats(None, [], tools="hermess")
    with pytest.raises(ConfigError, match=r"'thinks' is not the name .* \(did you mean 'think'"):
        find_reasoning_family("thinks")
    with pytest.raises(ConfigError, match="'zzz' is not the name of a tool parser; docs/tools.md lists"):
        find_tool_call_family("zzz")
