"""Every format of `call_formats.FORMATS` with every value, and beside every other text."""

from __future__ import annotations

from typing import Any

from mlxrun.api.parsers.registry import find_tool_call_family
from tests.helpers.parser_corpus.call_formats import FORMATS
from tests.helpers.parser_corpus.core import VALUES
from tests.helpers.parser_corpus.newer_formats import LOST_VALUES
from tests.helpers.parser_driver import Call, Case, Item

FIRST: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Oslo"})
SECOND: tuple[str, dict[str, Any]] = ("add", {"a": 1, "b": 2.0})


def drop_ignored(family: str, text: str) -> str:
    """Text as it stays: without the markers that mean nothing."""
    for marker in find_tool_call_family(family).ignored:
        text = text.replace(marker, "")
    return text.strip()


def _make_mixed_cases(form: str) -> list[Case]:
    family, anywhere, write = FORMATS[form]
    one, two, none = write(*FIRST), write(*SECOND), write("now", {})
    a, b = Call(*FIRST), Call(*SECOND)
    unknown, almost = write("rm", {"path": "/"}), write("get_weather2", {"city": "x"})
    stays = drop_ignored(family, unknown)
    cases: list[tuple[str, str, list[Item]]] = [
        ("space around", f"\n {one} \n", [a]),
        ("not offered", unknown, [stays]),
        ("almost the name", almost, [drop_ignored(family, almost)]),
    ]
    if anywhere:
        cases += [
            ("two calls", f"{one}\n{two}", [a, b]),
            ("three without space", one + two + none, [a, b, Call("now", {})]),
            ("text before", f"Let me look.\n\n{one}", ["Let me look.", a]),
            ("text after", f"{one}\n\nDone. ", [a, "Done. "]),
            ("text between", f"A {one} and\n{two}", ["A", a, "and", b]),
            ("not offered, then offered", f"{unknown}\n{one}", [stays, a]),
            ("offered, then not", f"{one}\n{unknown}", [a, stays]),
        ]
    found = [Case(f"{form}: {kind}", family, text, want) for kind, text, want in cases]
    if form == "harmony template":  # a header's beginning, which the prompt has the rest of
        return found
    return [*found, Case(f"{form}: no tools", family, f"x {one} y", [f"x {one} y"], tools=[])]


def _make_single_calls(form: str) -> list[Case]:
    family, _, write = FORMATS[form]
    return [
        Case(f"{form}: {kind}", family, write(name, arguments), [Call(name, arguments)], well_formed=True)
        for kind, name, arguments in VALUES
        if kind not in LOST_VALUES.get(form, ())
    ]


CASES = [case for form in FORMATS for case in (*_make_single_calls(form), *_make_mixed_cases(form))]
