"""Texts that are safe to show, in HTML and in Markdown."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from mlxrun.evals.reports import shown_text
from tests.helpers.report_jobs import HOSTILE


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_html_is_text(text: str) -> None:
    tags = Tags()
    tags.feed(str(shown_text.show_html(text)))
    assert set(tags.tags) <= {"bdi", "span"}
    marked = shown_text.mark_invisible(text)
    assert tags.text == re.sub(r"\[(U\+[0-9A-F]{4})\]", r"\1", marked)


def test_characters_that_cannot_be_seen_are_marked() -> None:
    assert shown_text.mark_invisible("a\u202eb\x00\u200b") == "a[U+202E]b[U+0000][U+200B]"
    assert shown_text.mark_invisible("tab\tline\n👩\u200d🚀 č 中") == "tab\tline\n👩\u200d🚀 č 中"


def test_the_script_marks_the_same_characters() -> None:
    source = resources.files("mlxrun.evals.reports").joinpath("assets/text.js").read_text(encoding="utf-8")
    found = re.search(r"INVISIBLE = /(\[.*\])/g", source)
    assert found is not None
    in_script, in_python = re.compile(found[1]), shown_text._INVISIBLE
    for code in range(0x10000):
        char = chr(code)
        assert bool(in_script.match(char)) == bool(in_python.match(char)), hex(code)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_is_one_line_without_markup(text: str) -> None:
    shown = shown_text.show_markdown(text)
    assert "\n" not in shown and not re.search(r"(?<!\\)[<>|`*\[]", shown)


def test_markdown_is_cut() -> None:
    assert shown_text.show_markdown("a\n b" * 100, 10) == "a ba ba b…"


def test_numbers() -> None:
    assert shown_text.format_share(0.8715) == "87.2\u00a0%"
    assert shown_text.style_numbers("-3.1 % [-4.0, 50.0]") == "\u22123.1\u00a0% [\u22124.0, 50.0]"
    assert shown_text.pluralize_count(1, "line") == "1 line"
    assert shown_text.pluralize_count(1200, "line") == "1,200 lines"
