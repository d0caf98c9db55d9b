"""`mlxrun tasks`."""

from __future__ import annotations

import pytest

from mlxrun.cli.main import main
from mlxrun.evals.tasks.task_box import list_task_names, read_task


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_the_list(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pipe nothing is wrapped, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["tasks"]) == 0
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["task", "rows", "revision", "licence", "lm-eval", "metrics"]
    assert [words[0] for words in lines] == list(list_task_names())
    gsm8k = next(words for words in lines if words[0] == "gsm8k")
    assert gsm8k[1:] == [
        *("openai/gsm8k/main/test", "cc7b047b", "MIT", "gsm8k_cot"),
        *("strict-match,", "flexible-extract"),
    ]


def test_names_are_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["tasks"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_task_names())


def test_one_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "arc"]) == 0
    assert capsys.readouterr().out == read_task("arc").path.read_text(encoding="utf-8")
    assert main(["tasks", "arcs"]) == 2
    assert "there is no task 'arcs' (did you mean 'arc'?); mlxrun has arc, " in capsys.readouterr().err
