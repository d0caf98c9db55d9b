"""docs/, README.md and CONTRIBUTING.md have short lines and short sentences; `make format` wraps lines.
Docstrings have short sentences; `python -m tools.docs_site.prose --docstrings PACKAGE` prints the long ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs_site.prose import (
    GENERATED,
    MAX_COLUMNS,
    ROOT,
    count_words,
    find_long_docstrings,
    find_long_lines,
    find_long_sentences,
    list_modules,
    list_pages,
    split_sentences,
    wrap_page,
)

# Page: how many of its sentences are longer than MAX_WORDS. The numbers may only become smaller.
LONG_SENTENCES = {
    "docs/config.md": 2,  # made from mlxrun/config/generate.py
    "docs/suites.md": 1,  # made from mlxrun/evals/suites/suite_reference.py
    "docs/tools.md": 2,  # the lists of other names of formats
}

# Packages whose public docstrings have no sentence longer than MAX_WORDS.
READ_PACKAGES: tuple[str, ...] = (
    "core",
    "config",
    "engine",
    "model",
    "jobs",
    "evals",
    "cluster",
    "api",
    "server",
    "cli",
)
# Module: how many of its docstrings' sentences are longer. The numbers may only become smaller.
LONG_DOCSTRINGS: dict[str, int] = {
    "mlxrun/cli/commands/bench.py": 2,  # tables of workloads in help texts
}


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_and_lines_are_short(page: Path) -> None:
    name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    sentences, lines = find_long_sentences(text), find_long_lines(text)
    assert len(sentences) <= LONG_SENTENCES.get(name, 0), sentences
    assert lines == [] or GENERATED.search(text), "make format wraps them"


@pytest.mark.parametrize("package", READ_PACKAGES)
def test_sentences_of_docstrings_are_short(package: str) -> None:
    modules = list_modules(package)
    assert modules
    for module in modules:
        sentences = find_long_docstrings(module.read_text(encoding="utf-8"))
        allowed = LONG_DOCSTRINGS.get(str(module.relative_to(ROOT)), 0)
        assert len(sentences) <= allowed, (module, sentences)


def test_every_page_is_measured() -> None:
    names = {str(page.relative_to(ROOT)) for page in list_pages()}
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "docs/architecture/model.md"} <= names
    assert names >= LONG_SENTENCES.keys()


LONG = "A sentence of words" + " that goes on" * 9 + " ends here."


def test_a_long_sentence_or_line_fails() -> None:
    """The same page with a fault planted."""
    page = (ROOT / "docs/first-steps.md").read_text(encoding="utf-8")
    assert find_long_sentences(page) == [] and find_long_lines(page) == []
    assert [found for _, found in find_long_sentences(f"{page}\n{LONG}\n")] == [LONG]
    assert len(find_long_lines(f"{page}\n- {LONG}\n")) == 1
    wrapped = wrap_page(f"{page}\n- {LONG}\n")
    assert find_long_lines(wrapped) == [] and len(find_long_sentences(wrapped)) == 1


@pytest.mark.parametrize(
    "source",
    [
        f'"""{LONG}"""',
        f'class Row:\n    """One row. {LONG}"""',
        f'class Row:\n    def join(self):\n        """Joins.\n\n        - {LONG}\n        """',
        f'async def join():\n    """`a`: a row; `b`: {LONG}"""',
    ],
)
def test_a_long_docstring_fails(source: str) -> None:
    """Source with a fault planted."""
    assert len(find_long_docstrings(source)) == 1
    assert find_long_docstrings(source.replace(" that goes on" * 9, "")) == []


@pytest.mark.parametrize(
    "source",
    [
        f'class _Row:\n    """{LONG}"""',
        f'def _join():\n    """{LONG}"""',
        f'def join():\n    def each():\n        """{LONG}"""',
        f'"""A table.\n\n    {LONG}\n"""',
        f'"""A call.\n\n```\n{LONG}\n```\n"""',
        f'"""{" ".join(f"`{name}`, `{name}2`: a field of a row;" for name in "abcdef")}"""',
    ],
)
def test_private_docstrings_blocks_and_lists_of_fields_are_not_measured(source: str) -> None:
    assert find_long_docstrings(source) == []


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG}\n```",
        f"| {LONG} |",
        f"# {LONG}",
        f"<!--\n{LONG}\n-->",
        f"`{LONG.replace(' ', '_')}`",
        f"![a](images/{'x' * MAX_COLUMNS}.svg)",
    ],
)
def test_what_is_no_prose_is_not_measured(text: str) -> None:
    assert find_long_sentences(text) == [] and find_long_lines(text) == []
    assert wrap_page(text) == f"{text}\n"


def test_how_words_and_sentences_are_counted() -> None:
    assert (
        count_words("`mlxrun batch a.jsonl --limit 3` at https://a.b/c?d=e runs [three words here](x.md).")
        == 7
    )
    assert split_sentences("One (of `a. b`). **Two.** Is [3. x](y. z.md) it? Yes.") == [
        "One (of `a. b`).",
        "**Two.",
        "Is [3. x](y. z.md) it?",
        "Yes.",
    ]


def test_wrapping_keeps_code_and_begins_no_list() -> None:
    text = f"- {'word ' * 22}`code of several words` {'word ' * 20}- 1. # > x\n  more\n\n1. one\n2. two\n"
    wrapped = wrap_page(text)
    assert "`code of several words`" in wrapped and wrap_page(wrapped) == wrapped
    assert wrapped.split() == text.split()
    assert [line[:2] for line in wrapped.splitlines() if line] == ["- ", "  ", "  ", "1.", "2."]
