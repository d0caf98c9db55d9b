"""Suite files: every problem has a file, a line and a column, and all are reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.core.errors import ConfigError
from mlxrun.evals.suites.suite_file import read_suite
from tests.helpers.suite_files import CAPITALS, write_suite

WRONG = """
    models:
      tiny:
      b: {configg: x.yaml}
      c: [1]
      d: org/name
    tasks:
      add:
        dta: x.csv
        few_shot: {count: 0}
        limit: "3"
      good: {data: x.csv, prompt: "{{ a }}"}
      chat:
        data: x.csv
        endpoint: chatt
    seeds: 3
    vary: {model.path: a}
    sampling: 1
"""


def test_all_problems_with_their_positions(tmp_path: Path) -> None:
    path = write_suite(tmp_path, WRONG)
    file = read_suite(path)
    with pytest.raises(ConfigError) as caught:
        file.raise_problems()
    assert [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()] == [
        "3:7: models.b.configg: unknown key (did you mean 'config'?)",
        "4:6: models.c: [1] is not a mapping of keys",
        "5:6: models.d: 'org/name' is not a mapping of keys (write {set: {model.path: org/name}})",
        "8:5: tasks.add.dta: unknown key (did you mean 'data'?)",
        "9:5: tasks.add.few_shot: `answer` is missing",
        "9:23: tasks.add.few_shot.count: 0 is less than 1",
        "10:12: tasks.add.limit: '3' is not an integer or null",
        "14:15: tasks.chat.endpoint: 'chatt' is not one of 'chat', 'completion' (did you mean 'chat'?)",
        "15:8: seeds: 3 is not a list",
        "16:20: vary.model.path: 'a' is not a list (write [a])",
        "17:1: sampling: unknown key",
    ]
    assert (list(file.suite.models), list(file.suite.tasks)) == (["tiny", "b"], ["good"])
    assert file.suite.models["b"].config == "x.yaml" and file.harmed == {"add"}
    assert file.suite.seeds == () and file.suite.vary == {}


def test_a_good_suite(tmp_path: Path) -> None:
    file = read_suite(write_suite(tmp_path, CAPITALS))
    file.raise_problems()
    assert file.folder == tmp_path and len(file.sha256) == 64
    assert file.locate("tasks", "capitals", "prompt") == f"{file.path}:5:13: tasks.capitals.prompt"
    assert file.locate("tasks", "capitals", "eval", "x") == f"{file.path}:4:5: tasks.capitals.eval.x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", ":1:5: this is not YAML: expected the node content, but found '<stream end>'"),
        (
            "models: {a: {{ b }} }",
            ":1:14: models.a: a key must be a string, not a list or a mapping; values with {{ }} need quotes",
        ),
        (
            "a: {{ b }} c",
            ":1:12: this is not YAML: expected <block end>, but found '<scalar>'; values with {{",
        ),
        ("models: {}\n---\n", ":2:1: a second YAML document (---) begins here: only one is allowed"),
        ("a", ":1:1: the file must be a mapping of keys, and is a single value"),
        ("", ":1:1: `models` is missing"),
        ("models: {a: }\nmodels: {b: }", ":2:1: models: this key has a value at "),
    ],
)
def test_what_is_no_suite(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_suite(path).raise_problems()
    assert f"{path}{says}" in str(caught.value)


def test_quotes_are_named_only_where_they_are_missing(tmp_path: Path) -> None:
    """Not for other mistakes of a suite whose templates have them."""
    path = write_suite(tmp_path, CAPITALS)
    path.write_text(path.read_text() + "tasks: {}\n")
    with pytest.raises(ConfigError, match=r"tasks: this key has a value at \S+ already$"):
        read_suite(path).raise_problems()


def test_a_list_is_no_suite(tmp_path: Path) -> None:
    """Nothing else is said of it, as that it lacks models."""
    path = tmp_path / "s.yaml"
    path.write_text("- a")
    with pytest.raises(ConfigError) as caught:
        read_suite(path).raise_problems()
    assert str(caught.value) == f"{path}:1:1: the file must be a mapping of keys, and is a list"


def test_a_suite_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="s.yaml: cannot read the suite: No such file"):
        read_suite(tmp_path / "s.yaml")
    (tmp_path / "s.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="the suite is not UTF-8 text"):
        read_suite(tmp_path / "s.yaml")


def test_a_job_is_no_suite(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')
    with pytest.raises(ConfigError) as caught:
        read_suite(path)
    assert str(caught.value) == f"{path}: this is a job, not a suite; run it with `mlxrun batch {path}`"
