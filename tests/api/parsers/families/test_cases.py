"""The cases of every family, and of reasoning alone, in the corpus."""

from __future__ import annotations

import pytest

from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.registry import TOOL_CALL_FAMILIES, find_tool_call_family
from tests.helpers.family_cases import CASES, FamilyCases


def test_every_family_has_cases() -> None:
    """Else `TestFamilies` would test nothing of it."""
    missing = {*TestFamilies.names, *TestReasoning.names} - {case.family for case in CASES}
    assert missing == set(), "add cases to tests/helpers/parser_corpus/, as docs/tools.md says"


class TestFamilies(FamilyCases):
    names = tuple(family.name for family in TOOL_CALL_FAMILIES)


class TestReasoning(FamilyCases):
    names = (None,)


@pytest.mark.parametrize(
    "cut", ['{"name": "f", "arguments": {"place": "Du', '{"name": "f", "arguments": {"place": "Du"}']
)
def test_a_call_of_plain_json_that_is_cut_off_is_content(cut: str) -> None:
    """An answer is a call only if all of it is JSON. The twin, a format that is known, has the call."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    found = {}
    for name in ("json", "hermes"):
        parser = AnswerParser(find_tool_call_family(name), None, tools)
        found[name] = {delta.kind for delta in (*parser.feed(cut), *parser.finish())}
    assert found == {"json": {"content"}, "hermes": {"call"}}
