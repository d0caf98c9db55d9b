"""Scorers that users write: loading, calling, and what they return or raise."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mlxrun.errors import JobError
from mlxrun.scoring.custom_scorer import CustomScorer, load_scorer
from mlxrun.scoring.verdict import ScoredAnswer, Verdict

ANSWER = ScoredAnswer("hello", 0, "x", {"custom_id": "a", "body": {"n": 1}}, {"usage": {"total_tokens": 3}})


def write(folder: Path, code: str) -> CustomScorer:
    path = folder / "my_scorer.py"
    path.write_text(code)
    return load_scorer(f"{path}:score")


def test_a_scorer_gets_what_it_names(tmp_path: Path) -> None:
    code = (
        "def score(answer, expected, line, response):\n"
        "    seen = [answer, expected, line['custom_id'], response['usage']['total_tokens']]\n"
        "    line['body']['n'] = response['usage']['total_tokens'] = 99\n"
        "    return {'score': 0.25, 'extracted': seen, 'comment': 'so so', 'scores': {'length': 1}}\n"
    )
    scorer = write(tmp_path, code)
    wanted = Verdict(0.25, ["hello", "x", "a", 3], None, {"length": 1.0}, "so so")
    assert scorer.score(ANSWER) == wanted
    assert scorer.score(ANSWER) == wanted  # it had copies, so that no record changes
    assert scorer.digest == hashlib.sha256(code.encode()).hexdigest()
    assert write(tmp_path, "def score(line): return line['custom_id'] == 'a'\n").score(ANSWER) == Verdict(1)
    assert write(tmp_path, "def score(**all): return len(all) / 4\n").score(ANSWER) == Verdict(1)
    assert write(tmp_path, "def score(answer, strict=False): return strict\n").score(ANSWER) == Verdict(0)


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("raise KeyError('x')", "raised KeyError: 'x'"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("return None", "returned None, where a number from 0 to 1 was expected"),
        ("return '1'", "returned '1', where a number from 0 to 1 was expected"),
        ("return 1.5", "returned 1.5, where a number from 0 to 1 was expected"),
        ("return float('nan')", "returned nan, where a number from 0 to 1 was expected"),
        ("return {'comment': 'x'}", "returned a dict with other keys than score (required), comment"),
        ("return {'score': 1, 'x': 2}", "returned a dict with other keys than score (required), comment"),
        ("return {'score': 1, 'scores': {'a': 7}}", "returned 7 as `a`, where a number from 0 to 1"),
        ("return {'score': 1, 'extracted': object()}", "is not JSON serializable"),
    ],
)
def test_failures_become_notes(tmp_path: Path, code: str, note: str) -> None:
    found = write(tmp_path, f"def score(answer):\n    {code}\n").score(ANSWER)
    assert found.score == 0 and found.note is not None
    assert note in found.note and "my_scorer.py:score" in found.note


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("score", "write module:function"),
        (":score", "write module:function"),
        ("x:not a name", "write module:function"),
        ("no_such_module_anywhere:score", "cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:score", "cannot be imported: there is no such file"),
        ("json:no_such", "json has no function 'no_such'"),
        ("json:decoder", "json has no function 'decoder'"),
        ("json:dumps", "its parameters must be of answer, expected, line, response"),
    ],
)
def test_scorers_that_cannot_be_loaded(name: str, reason: str) -> None:
    with pytest.raises(JobError, match=reason) as caught:
        load_scorer(name)
    assert repr(name) in str(caught.value) and caught.value.exit_code == 2


def test_code_that_is_broken(tmp_path: Path) -> None:
    for code, reason in (("def score(:", "SyntaxError"), ("import sys; sys.exit(1)", "SystemExit: 1")):
        with pytest.raises(JobError, match=reason):
            write(tmp_path, code)
    with pytest.raises(JobError, match="it has reference"):
        write(tmp_path, "def score(answer, reference): return 1")


def test_modules_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scorers_of_this_test.py").write_text("def half(answer): return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "none"))
    assert load_scorer("scorers_of_this_test:half").score(ANSWER) == Verdict(0.5)


def test_one_thread_at_a_time() -> None:
    """Lines are scored by several threads; a user's function need not be made for that."""
    busy, most = 0, 0

    def score(answer: Any) -> float:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        time.sleep(0.005)
        busy -= 1
        return 1

    scorer = CustomScorer("x", "", score, ("answer",))
    threads = [threading.Thread(target=scorer.score, args=(ANSWER,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_score_out_of_range_was_not_raised(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("def score(answer):\n    return 2\n")
    found = load_scorer(f"{tmp_path}/two.py:score").score(ScoredAnswer("x", 0, None, {}, {}))
    assert found.note is not None and "returned 2, where a number from 0 to 1" in found.note
