"""Where the tests of a module are: at its path under tests/, or in the table of tests/README.md."""

from __future__ import annotations

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
