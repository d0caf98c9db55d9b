"""The words of the code: names are the field's own, each class name occurs once in the package, and nothing
cites a list that a reader cannot open."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import mlxrun

ROOT = Path(mlxrun.__file__).parents[1]
PACKAGES = ("mlxrun", "benchmarks", "tools", "tests")

# Parts of a name that stand for a word of the field: say the word after the colon instead.
DIALECT = {
    "thought": "reasoning",
    "thoughts": "reasoning",
    "piece": "delta, or chunk of a prompt",
    "pieces": "deltas, or chunks of a prompt",
    "told": "a verb such as describe or report",
    "asked": "requested, or a verb such as read",
    "carried": "encoded",
    "leaves": "layer caches",
    "lent": "spare capacity",
    "half": "partial answer",
    "halves": "partial answers",
    "trail": "error paths",
    "scrap": "chunk",
    "scraps": "chunks",
    "draws": "sampling",
    "drawn": "sampled",
    "guarded": "a verb",
    "blob": "payload",
    "blobs": "payloads",
}
# Whole names, of classes and functions.
DIALECT_NAMES = {
    "Entry",
    "Line",
    "Room",
    "Part",
    "Prefixes",
    "Form",
    "allowed",
    "shared",
    "guarded",
    "Kept",
    "Lent",
}
# Lists that are not in the repository: "A53", "B28", "issue 5.6", "design 7".
OUTSIDE = re.compile(
    r"(?<![%\w])(?:[ABC]\d{1,2}(?:(?: to |-|, )[ABC]?\d{1,2})*\b(?!\w)"
    r"|issue \d|design(?:\.md)? \d|requirements?\.md)"
)


def modules(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def words_of(name: str) -> list[str]:
    """`readHalf_answer` -> read, half, answer."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that the module gives: definitions, parameters, variables, attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_names_are_the_fields_own() -> None:
    wrong = [
        f"{path}:{line} {name}: say {DIALECT[word]}"
        for path, tree in modules("mlxrun", "benchmarks")
        for line, name in [(1, path.stem), *names_in(tree)]
        for word in words_of(name)
        if word in DIALECT
    ]
    assert wrong == []


def test_no_class_or_function_has_a_name_of_the_dialect() -> None:
    wrong = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in modules("mlxrun")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.lstrip("_") in DIALECT_NAMES
    ]
    assert wrong == []


def test_every_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules("mlxrun"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


def test_nothing_refers_to_lists_outside_the_repository() -> None:
    files = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml", "Makefile", ".ci/*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wrong = [
        f"{name}:{number} {line.strip()}"
        for name in files
        if name != "tests/test_vocabulary.py" and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert wrong == []


def test_the_check_sees_the_dialect() -> None:
    tree = ast.parse("class HalfAnswer:\n    def take(self, pieces): self.told = 1\n")
    found = {word for _, name in names_in(tree) for word in words_of(name)} & set(DIALECT)
    assert found == {"half", "pieces", "told"}
    assert (
        OUTSIDE.search("as A53 says")
        and OUTSIDE.search("issue 5.6")
        and not OUTSIDE.search("an A100 and a B2B")
    )
