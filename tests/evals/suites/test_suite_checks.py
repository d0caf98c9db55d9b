"""What must fit together in a suite: each mistake is reported at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.suite_files import CAPITALS, find_problems, write_suite

HEAD = "models: {tiny: }\n"


def find(folder: Path, task: str, rest: str = "") -> list[str]:
    """Problems of a suite with one task, in one line, and more keys."""
    path = folder / "suite.yaml"
    write_suite(folder, "")
    path.write_text(f"{HEAD}tasks: {{t: {{{task}}}}}\n{rest}")
    return find_problems(path)


def test_nothing_is_missing_from_a_task_that_nobody_knows(tmp_path: Path) -> None:
    (found,) = find(tmp_path, "use: gsm9k")
    assert "tasks.t.use: there is no task 'gsm9k' (did you mean 'gsm8k'?)" in found


def test_a_good_suite_has_none(tmp_path: Path) -> None:
    assert find_problems(write_suite(tmp_path, CAPITALS)) == []


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("prompt: '{{ a }}'", "tasks.t: `data`, `hub` or `rows` is missing"),
        (
            "data: cities.csv, hub: {name: x}, prompt: '{{ area }}'",
            "tasks.t.hub: `data` is given too; give one of them",
        ),
        ("data: cities.csv", "tasks.t: one of prompt, prompts, messages, template is missing"),
        (
            "data: cities.csv, prompt: '{{ area }}', messages: [{role: user, content: '{{ area }}'}]",
            "tasks.t.messages: `prompt` is given too; give one of them",
        ),
        (
            "data: cities.csv, match: perplexity, prompt: '{{ area }}', system: Hello",
            "tasks.t.system: only chats have system, and `perplexity` is that of a text",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', few_shot: {answer: '{{ a }}', rows: [{a: 1}], data: x}",
            "tasks.t.few_shot.rows: `data` is given too; give one of them",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', choices: [a, b], expected: area, images: area",
            "tasks.t.images: only chats have images, and `choices` need a completion",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', choices: [a, b], expected: area, audio: area",
            "tasks.t.audio: only chats have audio, and `choices` need a completion",
        ),
        (
            "data: cities.csv, messages: [{role: user, content: '{{ area }}'}], system: x",
            "tasks.t.system: `messages` has all messages of a line; write it there",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', choices: [a, b], expected: area, generation: {n: 1}",
            "tasks.t.generation: nothing is generated for `choices`, so it would have no effect",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', generation: {stream: true}",
            "tasks.t.generation.stream: this is no setting of a generation",
        ),
        ("data: cities.csv, prompt: '{{ area }}', match: number", "tasks.t.match: it needs `expected`"),
        (
            "data: cities.csv, prompt: '{{ area }}', eval: {scorer: 'm:{{ area }}', grup: a}",
            "tasks.t.eval.grup: it is not known (did you mean 'group'?); eval takes expected, match and "
            "group, cluster, metrics, after, scorer, ignore_case; what else a scorer or a judge is to know "
            "belongs into expected",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', judge: later, eval: {pattern: x}",
            "tasks.t.eval.pattern: it belongs to the match regex, not to judge",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', expected: area, match: numbr",
            "(did you mean 'number'?)",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', choices: [a, b]",
            "tasks.t.choices: `choices` need a column as `expected`, or `expected` in `eval`",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}', expected: area, match: exact, eval: {match: exact}",
            "tasks.t.eval.match: `match` of the task is given too; give one of them",
        ),
        (
            "data: cities.csv, prompts: {a: '{{ area }}'}",
            "tasks.t.prompts: `vary: {prompt: [...]}` has to name those that run",
        ),
    ],
)
def test_tasks(tmp_path: Path, task: str, says: str) -> None:
    (problem,) = find(tmp_path, task)
    assert problem.startswith("suite.yaml:2:") and problem.endswith(says)


GOOD = "data: cities.csv, prompt: '{{ area }}', generation: {temperature: 0, seed: 1}"
TWO = "data: cities.csv, prompts: {a: '{{ area }}', b: '{{ capital }}'}"


@pytest.mark.parametrize(
    ("task", "rest", "says"),
    [
        (
            GOOD,
            "vary: {sampling.temperature: [0, 1]}",
            "temperature: it would have no effect on the task 't', whose generation sets temperature",
        ),
        (
            "data: cities.csv, prompt: '{{ area }}'",
            "vary: {generation.temperature: [0, 1], sampling.temperature: [0, 1]}",
            "temperature: it would have no effect beside generation.temperature, which requests have",
        ),
        (
            GOOD,
            "vary: {server.port: [1, 2]}",
            "vary.server.port: it is of servers, and would have no effect on runs",
        ),
        (
            GOOD,
            "seeds: [1, 2]",
            "seeds: they would have no effect on 't', whose generation sets a seed",
        ),
        (TWO, "vary: {prompt: [a]}\nseeds: [1, 1]", "seeds: it has a value twice"),
        (GOOD, "vary: {sampling.seed: [1]}", "vary.sampling.seed: write `seeds: [...]` for seeds"),
        (GOOD, "vary: {model.dtyp: [auto]}", "unknown key (did you mean 'model.dtype'?)"),
        (GOOD, "vary: {model.dtype: []}", "vary.model.dtype: it is empty"),
        (GOOD, "vary: {model.dtype: [auto, auto]}", "vary.model.dtype: it has a value twice"),
        (GOOD, "vary: {sampling.top_k: [5, 5.0]}", "vary.sampling.top_k: it has a value twice"),
        (GOOD, "vary: {model.dtype: [auto, int3]}", "model.dtype: 'int3' is not one of 'auto', 'float32', "),
        (GOOD, "vary: {prompt: [a]}", "vary.prompt: no task has `prompts`"),
        (GOOD, "vary: {few_shot.count: [1]}", "vary.few_shot.count: no task has `few_shot`"),
        (TWO, "vary: {prompt: [a, c]}", "vary.prompt: the task 't' has no prompt 'c'; it has a, b"),
        (
            "data: cities.csv, prompt: '{{ area }}', few_shot: {answer: '{{ area }}', count: 1}",
            "vary: {few_shot.count: [1, 0]}",
            "vary.few_shot.count: its values are integers from 1 on",
        ),
    ],
)
def test_vary(tmp_path: Path, task: str, rest: str, says: str) -> None:
    problems = find(tmp_path, task, rest)
    found = [each for each in problems if each.startswith(("suite.yaml:3:", "suite.yaml:4:"))]
    assert len(found) == 1 and says in found[0]


def test_a_judged_task_has_a_judge_or_waits_for_one(tmp_path: Path) -> None:
    judged = "data: cities.csv, prompt: '{{ area }}', expected: area"
    for given in ("match: judge", "eval: {match: judge}"):
        found = find(tmp_path, f"{judged}, {given}")
        assert len(found) == 1 and "match: there is no judge: give the task `judge: {prompt: " in found[0]
        assert find(tmp_path, f"{judged}, {given}, judge: later") == []


def test_unknown_keys_of_a_judge_are_named_where_they_are(tmp_path: Path) -> None:
    judge = "judge: {prompt: '{{ answer }}', generaton: {}, verdict: {number: {}, jsn: a}}"
    task = f"data: cities.csv, prompt: '{{{{ area }}}}', {judge}"
    found = [each.split(": ", 1)[1] for each in find(tmp_path, task)]
    assert found[:2] == [
        "tasks.t.judge.generaton: generaton is not known (did you mean 'generation'?); a judge takes prompt, "
        "messages, generation, verdict",
        "tasks.t.judge.verdict.jsn: verdict.jsn is not known (did you mean 'json'?); verdict takes choices, "
        "number, json, schema, after",
    ]


def test_names_become_folders(tmp_path: Path) -> None:
    path = write_suite(tmp_path, CAPITALS.replace("{tiny: }", "{a/b: , Tiny: , tiny: , Suite.json: }"))
    assert find_problems(path) == [
        "suite.yaml:1:10: models.a/b: a name becomes a folder: use letters, digits, `.`, `_` and `-`",
        "suite.yaml:1:25: models.tiny: the names 'Tiny' and 'tiny' would be one folder on some file systems",
        "suite.yaml:1:33: models.Suite.json: a file of the suite's folder has this name",
    ]
