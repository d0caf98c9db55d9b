"""The digest of a scorer, which changes with each source of the user that decides its scores."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxrun.jobs.lines.line_keys import digest_eval
from mlxrun.jobs.scoring import scorer_sources
from mlxrun.jobs.scoring.custom_scorer import load_scorer
from mlxrun.jobs.scoring.eval_spec import EvalSpec
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict

FILES = {
    "scorers_of_user.py": (
        "import json, numpy, pkg_of_user.inner\n"
        "from helper_of_user import half\n"
        "def score():\n"
        "    from late_of_user import value\n"
        "    return half() + value\n"
    ),
    "helper_of_user.py": "def half(): return 0.5\n",
    "late_of_user.py": "value = 0.0\ndef call():\n    import helper_of_user, scorers_of_user\n",
    "pkg_of_user/__init__.py": "",
    "pkg_of_user/inner.py": "from . import sibling\nfrom .sub.deep import x\n",
    "pkg_of_user/sibling.py": "from .sub import *\n",
    "pkg_of_user/sub/deep.py": "x = 1\n",
    "unused_of_user.py": "value = 1\n",
}
ANSWER = ScoredAnswer("hello", 0, "x", {}, {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [each for each in sys.modules if "_of_user" in each]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["scorers_of_user:score", "scorers_of_user.py:score"])
def test_each_module_that_is_imported_counts(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are then scored again. The twin looks at the scorer's own file."""
    before = load_scorer(name)
    assert before.score(ANSWER) == Verdict(0.5), "its process finds the same sources"
    for file, text in FILES.items():
        (folder / file).write_text(f"{text}# edited\n")
        after = load_scorer(name)
        evals = {digest_eval(EvalSpec("x", scorer=each)) for each in (before, after)}
        assert len(evals) == len({before.digest, after.digest}) == (1 if "unused" in file else 2), file
        (folder / file).write_text(text)
    assert load_scorer(name).digest == before.digest
    monkeypatch.setattr(scorer_sources, "list_imported", lambda path, package: {})
    assert load_scorer(name).digest == hash_text(FILES["scorers_of_user.py"])


def test_a_helper_that_changed_is_not_called(folder: Path) -> None:
    """The manifest has the digest of what was loaded."""
    scorer = load_scorer("scorers_of_user:score")
    (folder / "helper_of_user.py").write_text("def half(): return 0.75\n")
    note = scorer.score(ANSWER).note
    assert note is not None and "has changed since it was loaded" in note


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_source_that_imports_none_of_the_users_modules(folder: Path) -> None:
    """It has the digest that it had in earlier versions: runs that know it are not scored again."""
    text = "import json, numpy\nfrom mlxrun.core import errors\ndef score():\n    import missing_of_user\n"
    (folder / "alone_of_user.py").write_text(text)
    assert load_scorer("alone_of_user:score").digest == hash_text(text)


def test_a_helper_that_is_no_python(folder: Path) -> None:
    """Where it is not imported after all, it counts by its bytes."""
    (folder / "broken_of_user.py").write_text("def (")
    (folder / "odd_of_user.py").write_text("def score():\n    return 1\n    import broken_of_user\n")
    before = load_scorer("odd_of_user:score")
    assert before.score(ANSWER).score == 1
    (folder / "broken_of_user.py").write_text("def ((")
    assert load_scorer("odd_of_user:score").digest != before.digest
