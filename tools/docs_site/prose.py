"""Measures the prose of Markdown pages and docstrings, and wraps that of pages.

    python -m tools.docs_site.prose                     wraps all pages, as `make format` does
    python -m tools.docs_site.prose --docstrings model  prints long sentences of docstrings in mlxrun/model

Prose is paragraphs and items of lists. Code blocks, tables, headings, HTML and images are left as they are.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_COLUMNS = 120
MAX_WORDS = 25
GENERATED = re.compile(r"Do not edit\.")  # in a page that a program has written whole

_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"(?P<indent>\s*)(?P<marker>[-*]|\d+\.)\s+")
_FIXED = re.compile(r"\s*(#|\||>|!\[|\[!\[|---)")  # headings, tables, quotes, images, rules
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\([^)]*\)")
_URL = re.compile(r"https?://[^\s)]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")
_MARKER = re.compile(r" (?=(?:[-*+#>|]|\d+[.)])(?: |$))")  # a word that would begin a list at a line's start
_GLUE = "\x00"
_BLOCK = re.compile(r"^ {4}.*$", re.MULTILINE)  # an indented line of a docstring: code, a table, a drawing
_FIELD = re.compile(r";\s+(?=`[^`]+`(?:(?:,| and|, and) `[^`]+`)*:)")  # "; `name`: "


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Consecutive lines of prose. `line`: the number of the first one; `lead`: what stands before its words;
    `indent`: what stands before those of the others."""

    line: int
    lead: str
    indent: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The words, with one space between two."""
        return " ".join(" ".join(self.lines).split()).removeprefix(self.lead.strip()).lstrip()


def list_pages() -> list[Path]:
    """The pages whose prose is measured."""
    return [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def split_page(text: str) -> Iterator[Paragraph | str]:
    """The paragraphs of a page, and between them each other line."""
    paragraph: Paragraph | None = None
    fence = comment = ""
    for number, line in enumerate(text.splitlines(), 1):
        if fence or comment:
            closed = line.strip().startswith(fence) if fence else comment in line
            if closed:
                fence = comment = ""
            yield line
            continue
        item = _ITEM.match(line)
        is_html = line.lstrip().startswith("<")
        begins_fence = _FENCE.match(line)
        is_prose = bool(line.strip()) and not (begins_fence or is_html or _FIXED.match(line))
        if paragraph and (item or not is_prose):
            yield paragraph
            paragraph = None
        if not is_prose:
            fence = begins_fence[1] if begins_fence else ""
            comment = "-->" if "<!--" in line and "-->" not in line else ""
            yield line
        elif item:
            indent = item["indent"] + " " * (len(item["marker"]) + 1)
            paragraph = Paragraph(number, f"{item['indent']}{item['marker']} ", indent, (line,))
        elif paragraph:
            paragraph = replace(paragraph, lines=(*paragraph.lines, line))
        else:
            indent = line[: len(line) - len(line.lstrip())]
            paragraph = Paragraph(number, indent, indent, (line,))
    if paragraph:
        yield paragraph


def wrap_page(text: str) -> str:
    """The page with its paragraphs wrapped at MAX_COLUMNS."""
    lines: list[str] = []
    for part in split_page(text):
        lines += [part] if isinstance(part, str) else _wrap_paragraph(part)
    return "\n".join(lines) + "\n"


def _wrap_paragraph(paragraph: Paragraph) -> list[str]:
    """Code is not broken, and no line begins as an item of a list would."""
    text = _CODE.sub(lambda code: code[0].replace(" ", _GLUE), paragraph.text)
    wrapped = textwrap.wrap(
        _MARKER.sub(_GLUE, text),
        MAX_COLUMNS,
        initial_indent=paragraph.lead,
        subsequent_indent=paragraph.indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in wrapped]


def find_long_lines(text: str) -> list[int]:
    """The numbers of lines of prose that are too long and could be broken."""
    return [
        number
        for part in split_page(text)
        if isinstance(part, Paragraph)
        for number, line in enumerate(part.lines, part.line)
        if len(line) > MAX_COLUMNS and " " in _CODE.sub("code", line.strip())
    ]


def find_long_sentences(text: str) -> list[tuple[int, str]]:
    """Each sentence of prose that has more than MAX_WORDS words, with the line of its paragraph."""
    return [
        (part.line, sentence)
        for part in split_page(text)
        if isinstance(part, Paragraph)
        for sentence in split_sentences(part.text)
        if count_words(sentence) > MAX_WORDS
    ]


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph. A semicolon or a colon ends none."""
    kept: list[str] = []

    def hide(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"{_GLUE}{len(kept) - 1}{_GLUE}"

    hidden = _CODE.sub(hide, text)
    hidden = _URL.sub(hide, _LINK.sub(hide, hidden))
    restore = re.compile(f"{_GLUE}(\\d+){_GLUE}")
    sentences = _SENTENCE_END.split(hidden)
    for _ in range(2):  # code within a link
        sentences = [restore.sub(lambda found: kept[int(found[1])], sentence) for sentence in sentences]
    return sentences


def count_words(sentence: str) -> int:
    """How many words a sentence has; code, a URL and a number are one each."""
    plain = _LINK.sub(r"\g<text>", _CODE.sub("code", sentence))
    return sum(any(map(str.isalnum, word)) for word in _URL.sub("url", plain).split())


def list_modules(package: str) -> list[Path]:
    """The modules of a package of mlxrun, such as `model/kv`, with those of its subpackages."""
    return sorted((ROOT / "mlxrun" / package).rglob("*.py"))


def find_long_docstrings(source: str) -> list[tuple[int, str]]:
    """Each sentence of a public docstring that has more than MAX_WORDS words, with its owner's line.

    Each item of a list of fields ("`a`: ...; `b`: ...") counts as a sentence.
    """
    return [
        (line, sentence)
        for line, text in _list_docstrings(ast.parse(source))
        for part in split_page(_BLOCK.sub("", text))
        if isinstance(part, Paragraph)
        for whole in split_sentences(part.text)
        for sentence in _FIELD.split(whole)
        if count_words(sentence) > MAX_WORDS
    ]


def _list_docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[int, str]]:
    """Public docstrings in the order of the source. Functions within functions are private."""
    if text := ast.get_docstring(node, clean=not isinstance(node, ast.Module)):
        yield getattr(node, "lineno", 1), text
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(
                child.name
            ):
                yield from _list_docstrings(child)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name.endswith("__")


def _print_long_docstrings(packages: list[str]) -> None:
    for module in [module for package in packages for module in list_modules(package)]:
        for line, sentence in find_long_docstrings(module.read_text(encoding="utf-8")):
            print(f"{module.relative_to(ROOT)}:{line}: {count_words(sentence)} words: {sentence}")


def _wrap_pages() -> None:
    for page in list_pages():
        text = page.read_text(encoding="utf-8")
        if not GENERATED.search(text):
            page.write_text(wrap_page(text), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--docstrings"]:
        _print_long_docstrings(sys.argv[2:])
    else:
        _wrap_pages()
