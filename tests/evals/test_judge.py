"""Judges as they are written: keys, template, and the lines that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.judge import find_question, parse_judge, read_judge

GOOD: dict[str, Any] = {"prompt": "{{ question }}: {{ answer }}", "verdict": {"choices": {"A": 1, "B": 0}}}
COLUMNS: dict[str, Any] = {"question": "q", "answer": "{{ no template }}", "expected": None, "group": "g"}
COLUMNS |= {"id": "a", "line": {}}


def test_a_line() -> None:
    """An answer that looks like a template is text."""
    judge = parse_judge({**GOOD, "generation": {"max_tokens": 5}}, "j")
    assert judge.make_line("a", COLUMNS) == {
        "id": "a",
        "messages": [{"role": "user", "content": "q: {{ no template }}"}],
        "max_tokens": 5,
    }
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "{{ row.answer }}"}]
    judge = parse_judge({"messages": messages, "verdict": GOOD["verdict"]}, "j")
    assert judge.make_line("a", COLUMNS)["messages"][1]["content"] == "{{ no template }}"


def test_a_schema_is_the_response_format() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    value = {**GOOD, "verdict": {"json": "ok", "schema": schema}}
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    assert parse_judge(value, "j").make_line("a", COLUMNS)["response_format"] == wanted
    own = {"type": "json_object"}
    line = parse_judge({**value, "generation": {"response_format": own}}, "j").make_line("a", COLUMNS)
    assert line["response_format"] == own


def test_the_digest_is_of_everything() -> None:
    variants = [
        GOOD,
        {**GOOD, "prompt": "{{ answer }}"},
        {**GOOD, "generation": {"temperature": 0}},
        {**GOOD, "verdict": {"choices": {"A": 1, "B": 0.5}}},
    ]
    digests = [parse_judge(each, "j").digest for each in variants]
    assert len(set(digests)) == 4 and parse_judge(dict(GOOD), "other").digest == digests[0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "j: a judge is a mapping"),
        ({**GOOD, "model": "x"}, "j: model is not known; a judge takes prompt, messages"),
        ({"verdict": GOOD["verdict"]}, "j: a judge needs one of prompt and messages"),
        ({**GOOD, "messages": []}, "j: a judge needs one of prompt and messages"),
        ({**GOOD, "prompt": 3}, "j: prompt must be the text"),
        ({**GOOD, "generation": 3}, "j: generation must be an object"),
        ({**GOOD, "generation": {"n": 2}}, "j: generation.n cannot be given"),
        ({"prompt": "{{ answer }}"}, "j: verdict must be an object"),
        ({**GOOD, "prompt": "{{ answer }} {{ reference }}"}, "j: 'reference' is not a variable of a judge"),
        ({**GOOD, "prompt": "{{ question }}"}, "j: the template does not show the answer"),
        ({**GOOD, "prompt": "fine?"}, "j: the template uses no column"),
        ({**GOOD, "prompt": "{{ answer"}, "j: line 1 of the template"),
    ],
)
def test_judges_that_are_refused(value: Any, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        parse_judge(value, "j")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": "{{ answer }} {{ expected }}"}, "j: the line 'a': the template cannot be filled in"),
        ({"generation": {"max_token": 3}}, "j: the line 'a': max_token: "),
        ({"generation": {"stream": True}}, "j: the line 'a': stream is not supported"),
    ],
)
def test_lines_that_no_model_could_answer(changes: Any, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        parse_judge({**GOOD, **changes}, "j").make_line("a", COLUMNS)


def test_all_mistakes_of_a_file_are_said_at_once_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "judge.yaml"
    path.write_text(
        "prompt: '{{ answer }}'\nmodel: x\ngeneration:\n  n: 2\n"
        "verdict:\n  choices: {A: 1, B: 2}\n  after: ''\n"
    )
    with pytest.raises(JobError) as found:
        read_judge(path)
    assert str(found.value).splitlines() == [
        f"{path}:2:1: model is not known; a judge takes prompt, messages, generation, verdict",
        f"{path}:4:3: generation.n cannot be given",
        f"{path}:7:3: verdict.after must be a string that is not empty",
        f"{path}:6:19: verdict.choices.B must be a score from 0 to 1, not 2",
    ]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "judge.yaml"
    path.write_text("prompt: '{{ answer }}'\nverdict:\n  choices: {A: 1, B: 0}\n")
    assert read_judge(path).name == str(path)
    for text, reason in (
        ("prompt: [", r"judge.yaml:\d:\d+: this is not YAML"),
        ("prompt: x\nprompt: y\n", "judge.yaml:2"),
        ("prompt: x\n---\nprompt: y\n", r"judge.yaml:2:1: a second YAML document"),
        ("verdict: 3\n", "judge.yaml:1:1: a judge needs one of"),
    ):
        path.write_text(text)
        with pytest.raises(JobError, match=reason):
            read_judge(path)
    with pytest.raises(JobError, match=r"none.yaml: cannot read the judge"):
        read_judge(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("body", "question"),
    [
        ({"prompt": "once"}, "once"),
        ({"prompt": ["first", "second"]}, "first"),
        ({"prompt": [1, 2]}, ""),
        ({"input": "what?"}, "what?"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "what?"}]}]}, "what?"),
        (
            {
                "messages": [
                    {"role": "user", "content": "first"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "second"}]},
                    {"role": "assistant", "content": "y"},
                ]
            },
            "second",
        ),
        ({"messages": []}, ""),
        ({}, ""),
    ],
)
def test_the_question_of_a_request(body: Any, question: str) -> None:
    assert find_question(body) == question
