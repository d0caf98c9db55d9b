"""Where the tests of a module are: at its path under tests/, or in the table of tests/README.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mlxrun

PACKAGE = Path(mlxrun.__file__).parent
TESTS = PACKAGE.parent / "tests"
TABLE = dict(
    re.findall(
        r"^\| `([\w/]+(?:\.py|/))` \| `tests/([\w/]+\.py)` \|$", (TESTS / "README.md").read_text(), re.M
    )
)
MODULES = sorted(
    str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")
)


def find_own_tests(module: str) -> list[Path]:
    """The test files at the path of a module."""
    path = TESTS / module
    topics = path.parent.glob(f"test_{path.stem}_*.py")
    return [found for found in (path.with_name(f"test_{path.name}"), *topics) if found.is_file()]


def test_every_module_has_tests_at_its_path_or_in_the_table() -> None:
    lost = [
        module
        for module in MODULES
        if not find_own_tests(module) and module not in TABLE and not any(map(module.startswith, TABLE))
    ]
    assert lost == [], "add a test file, or a row to tests/README.md"


def test_the_table_is_up_to_date() -> None:
    assert [test for test in TABLE.values() if not (TESTS / test).is_file()] == []
    assert [row for row in TABLE if not (PACKAGE / row).exists()] == []
    assert [row for row in TABLE if row.endswith(".py") and find_own_tests(row)] == []


def test_what_counts_as_a_modules_own_tests() -> None:
    assert find_own_tests("engine/scheduler/scheduler.py") and not find_own_tests(
        "scheduler/no_such_module.py"
    )


def find_private_patches(text: str) -> list[str]:
    """Names with an underscore that a test replaces in another module."""
    by_name = re.findall(r"setattr\(\s*[\w.]+, *\"(_[a-z]\w*)\"", text)
    by_path = re.findall(r"(?:setattr|patch)\(\s*\"[\w.]+\.(_[a-z]\w*)\"", text)
    return by_name + by_path


def test_tests_replace_public_names_only() -> None:
    """What a test replaces is a seam, which may not be renamed unseen. A few belong to other libraries."""
    found = {name for path in TESTS.rglob("*.py") for name in find_private_patches(path.read_text())}
    assert found == {"_exit", "_trim"}, "give what the test replaces a public name"


def test_private_patches_are_found() -> None:
    by_name, by_path = ("monkeypatch.setattr(os, " + '"_exit", f)'), ("patch.setattr(" + '"os._quit", f)')
    text = by_name + by_path + 'patch.setattr(os, "exit", f)'
    assert find_private_patches(text) == ["_exit", "_quit"]


def find_endless(text: str) -> list[str]:
    """Calls of `subprocess.run` without a limit of time."""
    if "subprocess.run(" not in text:
        return []
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    runs = [call for call in calls if ast.unparse(call.func) == "subprocess.run"]
    return [ast.unparse(run) for run in runs if "timeout" not in {each.arg for each in run.keywords}]


def test_no_test_waits_for_a_program_without_a_limit() -> None:
    """`run_program` of tests/helpers/command_processes.py has one, and kills what a program has started."""
    assert [call for path in TESTS.rglob("*.py") for call in find_endless(path.read_text())] == []
    assert find_endless("subprocess.run('a', timeout=1); subprocess.run('b')") == ["subprocess.run('b')"]
