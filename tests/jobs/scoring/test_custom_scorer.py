"""Scorers that users write: loading, calling, and what they return or raise."""

from __future__ import annotations

import hashlib
import os
import py_compile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.scoring import custom_scorer
from mlxrun.jobs.scoring.custom_scorer import CustomScorer, load_scorer
from mlxrun.jobs.scoring.eval_spec import EvalSpec
from mlxrun.jobs.scoring.line_scores import score_response
from mlxrun.jobs.scoring.measure import ScoreMeasure
from mlxrun.jobs.scoring.scorer_process import ScorerLimits
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict

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
    assert write(tmp_path, "def score(**all): return len(all) / 6\n").score(ANSWER) == Verdict(1)
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
        ("return {'comment': 'x'}", "returned a dict with other keys than score (or sums), comment"),
        ("return {'score': 1, 'x': 2}", "returned a dict with other keys than score (or sums), comment"),
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


@pytest.mark.parametrize("name", ["{}:score", "{}.py:score", "by_{}.py:score", "by_{}:score"])
def test_a_source_is_called_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Python takes its cached code for that of a source with the same size and second, be it that of the
    scorer, or of a module that it imports: here, of the version before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"edited_{len(name)}_{name[0] == 'b'}"
    for score in ("0.25", "0.75"):
        path = tmp_path / f"{module}.py"
        path.write_text(f"def score(answer):\n    return {score}\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        if score == "0.25":
            py_compile.compile(str(path))
    (tmp_path / f"by_{module}.py").write_text(f"from {module} import score\n")
    scorer = load_scorer(name.format(module))
    assert scorer.score(ANSWER).score == 0.75


def test_one_call_at_a_time(tmp_path: Path) -> None:
    """Lines are scored by several threads; a user's function need not be made for that."""
    log = tmp_path / "log"
    code = (
        "import time\n"
        "def write(text):\n"
        f"    with open({str(log)!r}, 'a') as file: file.write(text)\n"
        "def score(answer):\n"
        "    write('<'); time.sleep(0.005); write('>')\n"
        "    return 1\n"
    )
    scorer = write(tmp_path, code)
    threads = [threading.Thread(target=scorer.score, args=(ANSWER,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text() == "<>" * 8


def test_a_function_keeps_what_it_remembers(tmp_path: Path) -> None:
    """All answers are scored by one process."""
    scorer = write(tmp_path, "seen = []\ndef score():\n    seen.append(1)\n    return len(seen) / 8\n")
    assert [scorer.score(ANSWER).score for _ in range(3)] == [0.125, 0.25, 0.375]


def test_a_file_that_changed_is_not_called(tmp_path: Path) -> None:
    """The manifest has the digest of what was loaded."""
    scorer = write(tmp_path, "def score(): return 1\n")
    write(tmp_path, "def score(): return 0.5\n")
    note = scorer.score(ANSWER).note
    assert note is not None and "has changed since it was loaded" in note


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(600)", "it took more than 1 s"),
        ("while True: pass", "it took more than 1 s"),
        ("kept = [bytearray(10**7) for _ in range(1000)]", "it took more than 0.5 GB of memory"),
        ("import os; os._exit(7)", "its process ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 11)", "its process ended by SIGSEGV"),
    ],
)
def test_a_function_that_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    """It is tried once more, in another process; other answers are scored as if nothing had been."""
    seconds = 1.0 if reason.endswith(" s") else 60.0  # a slow machine fills memory slowly
    monkeypatch.setattr(custom_scorer, "LIMITS", ScorerLimits(seconds, 500_000_000))
    starts = tmp_path / "starts"
    lines = ["def score(answer):", "    if answer == 'good': return 1", f"    {code}", "    return 1"]
    scorer = write(tmp_path, "\n".join([f"with open({str(starts)!r}, 'a') as file: file.write('.')", *lines]))
    spec, bad = EvalSpec("x", scorer=scorer), {"choices": [{"message": {"content": "bad"}}] * 5}
    found = score_response(spec, bad, {"body": {"n": 5}})
    assert found["score"] == 0 and found["note"].startswith("the scorer was ended 2 times: ")
    assert reason in found["note"]
    assert starts.read_text() == "..."  # to load it, and two tries for all five choices
    assert score_response(spec, {"choices": [{"message": {"content": "good"}}]})["score"] == 1


def test_a_score_out_of_range_was_not_raised(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("def score(answer):\n    return 2\n")
    found = load_scorer(f"{tmp_path}/two.py:score").score(ScoredAnswer("x", 0, None, {}, {}))
    assert found.note is not None and "returned 2, where a number from 0 to 1" in found.note


def test_a_scorer_may_return_any_number_with_its_unit(tmp_path: Path) -> None:
    code = "def score(answer): return {'score': -12.5, 'unit': 'ms', 'better': 'lower', 'aggregate': 'p90'}\n"
    scorer = write(tmp_path, code)
    assert scorer.score(ANSWER) == Verdict(-12.5, measure=ScoreMeasure("ms", "lower", "p90"))
    spec = EvalSpec("x", scorer=scorer)
    found = score_response(spec, {"choices": [{"text": "hello"}]})
    assert (found["score"], found["measure"]) == (
        -12.5,
        {"unit": "ms", "better": "lower", "aggregate": "p90"},
    )
    two = {"choices": [{"text": "a"}, {"text": "b"}]}
    found = score_response(spec, two, {"body": {"n": 2}})
    assert found["choices"] == [-12.5, -12.5] and "scores" not in found  # no pass@k of milliseconds
    found = score_response(replace(spec, metrics=("pass@2",)), two, {"body": {"n": 2}})
    assert found["note"] == "the score has a measure, and eval.metrics are of scores from 0 to 1"


def test_sums_are_added_up_over_choices_and_give_a_score(tmp_path: Path) -> None:
    code = (
        "def score(answer):\n"
        "    sums = {'right': len(answer), 'wrong': 1}\n"
        "    return {'sums': sums, 'aggregate': 'right / (right + wrong)'}\n"
    )
    spec = EvalSpec("x", scorer=write(tmp_path, code))
    found = score_response(spec, {"choices": [{"text": "abc"}, {"text": "a"}]}, {"body": {"n": 2}})
    assert (found["score"], found["sums"]) == ((0.75 + 0.5) / 2, {"right": 4.0, "wrong": 2.0})


@pytest.mark.parametrize(
    ("result", "note"),
    [
        ("{'score': float('inf'), 'unit': 's'}", "returned inf as `score`, where a number was expected"),
        ("{'score': 2, 'unit': 3}", "returned 3 as `unit`, where a text was expected"),
        ("{'score': 2, 'better': 'less'}", "returned 'less' as `better`, where `lower` or `higher`"),
        ("{'sums': {'a': 'x'}, 'aggregate': 'a'}", "returned 'x' as `a`, where a number was expected"),
        (
            "{'sums': {'a': 0}, 'aggregate': '1 / a'}",
            "returned sums of which 1 / a is undefined, and no `score`",
        ),
        ("{'unit': 's'}", "returned a dict with other keys than score (or sums)"),
        ("2", "returned 2, where a number from 0 to 1 was expected; other numbers need their `unit`"),
    ],
)
def test_wrong_measures_become_notes(tmp_path: Path, result: str, note: str) -> None:
    found = write(tmp_path, f"def score(answer): return {result}\n").score(ANSWER)
    assert found.score == 0 and found.measure is None and note in str(found.note)


def test_choices_with_several_measures_have_no_score(tmp_path: Path) -> None:
    spec = EvalSpec("x", scorer=write(tmp_path, "def score(answer): return {'score': 3, 'unit': answer}\n"))
    found = score_response(spec, {"choices": [{"text": "a"}, {"text": "b"}]}, {"body": {"n": 2}})
    assert found["note"] == "the score has a measure, and its choices have several measures"
    assert found["score"] == 0 and "measure" not in found
