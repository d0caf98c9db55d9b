"""The words of the code: names are the field's own, each class name occurs once in the package, and nothing
cites a list that a reader cannot open."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import mlxrun
from tests.helpers.command_processes import run_program

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
# Words with one meaning: each occurs in names of these places only; elsewhere say what is after the colon.
RESERVED = {
    "score": (
        r"mlxrun/(jobs|evals)/|cli/commands/(runs/score|eval)",
        "prompt logprobs, attention logits, or relevance",
    ),
    "scores": (
        r"mlxrun/(jobs|evals)/|gguf/tokenizer|cli/commands|openai/pooled",
        "logprobs, logits, or weights",
    ),
    "scorer": (r"mlxrun/(jobs|evals)/|cli/commands", "what it reads"),
    "scoring": (r"mlxrun/(jobs|evals)/", "prompt logprobs"),
    "scored": (r"mlxrun/(jobs|evals)/|api/openai/", "prompt logprobs"),
    "probe": (r"cli/bench/serve/|api/(text/templates|structured)/", "load check"),
    "probes": (r"cli/bench/serve/", "load check"),
    "parity": (r"^$", "load check"),
    "boundary": (r"^$", "cache position"),
    "boundaries": (r"^$", "cache positions"),
    "keypoint": (r"^$", "cache position"),
    "keypoints": (r"^$", "cache positions"),
    "checkpoints": (r"^$", "interval states, or weights"),
    "tap": (r"^$", "hook"),
    "route": (r"mlxrun/server/", "hook"),
}
# Words that a part must not have, since they mean something else in the whole package.
ELSEWHERE = {
    "draft": (r"engine/prefix_cache/", "planned: a draft is what speculation predicts"),
    "drafts": (r"engine/prefix_cache/", "planned: drafts are what speculation predicts"),
    "adapter": (r"model/(load_check|pooling|speculation)/", "caller: an adapter is a LoRA adapter"),
}
# What texts say in one way: on the left what they do not say.
SPELLINGS = {
    r"(?i)quantis": "quantize",
    r"(?i)parity[ -]probe|check at load": "load check",
    r"(?i)\bkeypoints?\b|branch[ _]points?\b|snapshot[ _]positions?\b": "cache position",
    r"\bRowStates?\b": "RunningRow, or RecurrentStates",
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


def modules(*packages: str) -> Iterator[tuple[Path, list[tuple[int, str, type[ast.AST]]]]]:
    """The path of each module, and its names."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), read_names(path)


@functools.cache
def read_names(path: Path) -> list[tuple[int, str, type[ast.AST]]]:
    """All names of a module. It is parsed once for all tests."""
    return [*names_in(ast.parse(path.read_text(encoding="utf-8")))]


@functools.cache
def words_of(name: str) -> list[str]:
    """`readHalf_answer` -> read, half, answer."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def names_in(tree: ast.Module) -> Iterator[tuple[int, str, type[ast.AST]]]:
    """Every name that the module gives: definitions, parameters, variables, attributes that it sets. Each
    with its line, and the type of its node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, type(node)
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, type(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, type(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, type(node)


def find_words(*packages: str) -> Iterator[tuple[str, str, str]]:
    """Place, name and word of each name's words. Names of tests are sentences, so their words are not
    checked."""
    for path, names in modules(*packages):
        for line, name, _ in [(1, path.stem, ast.Module), *names]:
            if not name.startswith("test_"):
                yield from ((f"{path}:{line}", name, word) for word in words_of(name))


def test_names_are_the_fields_own() -> None:
    halves = {"half", "halves"}  # outside the package they are the number
    wrong = [
        f"{place} {name}: say {DIALECT[word]}"
        for place, name, word in find_words(*PACKAGES)
        if word in DIALECT and (place.startswith("mlxrun") or word not in halves)
    ]
    assert wrong == []


def find_misplaced(words: Iterable[tuple[str, str, str]]) -> list[str]:
    """Names with a word that means something else in their place."""
    wrong = []
    for place, name, word in words:
        allowed, say = RESERVED.get(word, ("", ""))
        refused, instead = ELSEWHERE.get(word, (r"^$", ""))
        if not re.search(allowed, place) or re.search(refused, place):
            wrong.append(f"{place} {name}: say {say or instead}")
    return wrong


def test_words_have_one_meaning() -> None:
    assert find_misplaced(find_words("mlxrun")) == []


def test_texts_have_one_spelling() -> None:
    assert [f"{place}: say {say}" for place, text in list_lines() for say in find_spellings(text)] == []


def find_spellings(text: str) -> list[str]:
    return [say for pattern, say in SPELLINGS.items() if re.search(pattern, text)]


def test_no_class_or_function_has_a_name_of_the_dialect() -> None:
    wrong = [
        f"{path}:{line} {name}"
        for path, names in modules("mlxrun")
        for line, name, kind in names
        if issubclass(kind, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and name.lstrip("_") in DIALECT_NAMES
    ]
    assert wrong == []


def test_every_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, names in modules("mlxrun"):
        for line, name, kind in names:
            if kind is ast.ClassDef:
                places[name.lstrip("_")].append(f"{path}:{line}")
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


def list_lines() -> Iterator[tuple[str, str]]:
    """Place and text of each line of the repository, but for this file and what past releases were told."""
    listed = ["git", "ls-files", "*.py", "*.md", "*.yaml", "Makefile", ".ci/*"]
    for name in run_program(listed, cwd=ROOT, check=True).stdout.split():
        if name not in ("tests/test_vocabulary.py", "CHANGELOG.md") and (ROOT / name).is_file():
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
            yield from ((f"{name}:{number}", line.strip()) for number, line in enumerate(lines, 1))


def test_nothing_refers_to_lists_outside_the_repository() -> None:
    assert [f"{place} {line}" for place, line in list_lines() if OUTSIDE.search(line)] == []


def test_the_check_sees_the_dialect() -> None:
    tree = ast.parse("class HalfAnswer:\n    def take(self, pieces): self.told = 1\n")
    found = {word for _, name, _ in names_in(tree) for word in words_of(name)} & set(DIALECT)
    assert found == {"half", "pieces", "told"}
    assert (
        OUTSIDE.search("as A53 says")
        and OUTSIDE.search("issue 5.6")
        and not OUTSIDE.search("an A100 and a B2B")
    )


def test_the_check_sees_words_in_wrong_places() -> None:
    names = [
        ("mlxrun/model/run/x.py:1", "score_row", "score"),
        ("mlxrun/engine/prefix_cache/x.py:2", "draft", "draft"),
    ]
    assert len(find_misplaced(names)) == 2
    assert find_misplaced([("mlxrun/jobs/scoring/x.py:1", "score_line", "score")]) == []
    assert find_spellings("a quantised cache") == ["quantize"] and find_spellings("a quantized cache") == []
