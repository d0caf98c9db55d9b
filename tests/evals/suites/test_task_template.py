"""The job lines of rows: messages, examples, images, choices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.suites.suite_settings import FewShot, SuiteTask
from mlxrun.evals.suites.task_rows import open_rows
from mlxrun.evals.suites.task_template import (
    TaskTemplate,
    build_eval,
    choose_examples,
    compile_parts,
    locate_scorer,
)
from mlxrun.jobs.lines.table_files import RowError
from tests.helpers.suite_files import CITIES

ROW = {"country": "France", "capital": "Paris", "options": ["Rome", "Paris"]}
ASK = SuiteTask(data="c.csv", prompt="{{ country }}?")
FEW = FewShot("{{ capital }}!", count=2)


def make(task: SuiteTask, folder: Path = Path(), **fields: Any) -> TaskTemplate:
    parts = {}
    for key, part in compile_parts(task, folder, lambda key: f"suite.yaml:1:1: {key}"):
        if isinstance(part, JobError):
            raise part
        parts[key] = part
    return TaskTemplate(task, parts, folder, **fields)


def find_texts(line: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in line["messages"]]


def test_a_message() -> None:
    assert make(ASK).render(ROW, 1) == {"messages": [{"role": "user", "content": "France?"}]}
    line = make(replace(ASK, system="About {{ row.country }}.")).render(ROW, 1)
    assert find_texts(line) == [("system", "About France."), ("user", "France?")]
    line = make(replace(ASK, endpoint="completion")).render(ROW, 1)
    assert line == {"prompt": "France?"}
    task = replace(ASK, endpoint="completion", system="On {{ country }}.\n\n", few_shot=FEW)
    line = make(task, examples=[(2, {"country": "Peru", "capital": "Lima"})]).render(ROW, 1)
    assert line == {"prompt": "On France.\nPeru? Lima!\n\nFrance?"}, "before the examples"


def test_templates_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("Now {{ country }}\n")
    task = SuiteTask(template="t.jinja")
    assert find_texts(make(task, tmp_path).render(ROW, 1)) == [("user", "Now France")]
    task = replace(task, endpoint="completion")
    assert make(task, tmp_path).render(ROW, 1) == {"prompt": "Now France"}
    (tmp_path / "t.yaml").write_text('prompt: "{{ country }}"\nmax_tokens: 3\n')
    assert make(SuiteTask(template="t.yaml"), tmp_path).render(ROW, 1) == {
        "prompt": "France",
        "max_tokens": 3,
    }
    with pytest.raises(JobError, match="cannot read the template"):
        make(SuiteTask(template="none.jinja", endpoint="completion"), tmp_path)
    (tmp_path / "latin.jinja").write_bytes(b"Caf\xe9 {{ country }}")
    for endpoint in ("chat", "completion"):
        with pytest.raises(JobError, match=r"latin\.jinja: the template is not UTF-8 text"):
            make(SuiteTask(template="latin.jinja", endpoint=endpoint), tmp_path)
    messages = ({"role": "user", "content": "{{ country }}"}, {"role": "assistant", "content": "It is"})
    assert find_texts(make(SuiteTask(messages=messages)).render(ROW, 1))[1] == ("assistant", "It is")


def test_examples_of_a_chat() -> None:
    """They stand behind the system message; a row is no example of itself."""
    examples = [
        (2, {"country": "Japan", "capital": "Tokyo"}),
        (1, ROW),
        (3, {"country": "Peru", "capital": "Lima"}),
    ]
    task = replace(ASK, system="Short.", few_shot=FEW)
    template = make(task, examples=examples, own_examples=True)
    shown = [("system", "Short."), ("user", "Japan?"), ("assistant", "Tokyo!")]
    peru = [("user", "Peru?"), ("assistant", "Lima!"), ("user", "France?")]
    assert find_texts(template.render(ROW, 1)) == shown + peru
    france = [("user", "France?"), ("assistant", "Paris!"), ("user", "Chad?")]
    assert find_texts(template.render({"country": "Chad", "capital": ""}, 4)) == shown + france
    others = replace(template, own_examples=False)
    assert find_texts(others.render(ROW, 1))[3:5] == [("user", "France?"), ("assistant", "Paris!")]


def test_examples_of_a_completion() -> None:
    task = replace(ASK, endpoint="completion", few_shot=replace(FEW, separator="\n"), delimiter=" = ")
    template = make(task, examples=[(2, {"country": "Peru", "capital": "Lima"})])
    assert template.render(ROW, 1) == {"prompt": "Peru? = Lima!\nFrance?"}


def test_examples_are_chosen_by_their_seed(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("a\n" + "".join(f"{n}\n" for n in range(50)))
    source = open_rows("c.csv", None, tmp_path)
    first, again, other = (choose_examples(replace(FEW, seed=seed), source) for seed in (1, 1, 2))
    assert first == again and len(first) == 3 and first != other
    assert all(row["a"] == str(number - 1) for number, row in first)
    (tmp_path / "two.csv").write_text(CITIES.partition("Peru")[0])
    with pytest.raises(JobError, match="few_shot.count is 3, but .*two.csv has 2 rows"):
        choose_examples(replace(FEW, count=3), open_rows("two.csv", None, tmp_path))
    (tmp_path / "bad.jsonl").write_text("{}\n[]\n")
    with pytest.raises(JobError, match="bad.jsonl:2: not a JSON object"):
        choose_examples(FEW, open_rows("bad.jsonl", None, tmp_path))


def test_the_first_examples_of_each_value(tmp_path: Path) -> None:
    """`by` gives a question the examples of its own value, in the order of the table."""
    rows = [f"{kind},{kind}{n}\n" for n in range(9) for kind in "xyz"]
    (tmp_path / "c.csv").write_text("kind,capital\n" + "".join(rows) + "w,w0\n")
    few = replace(FEW, order="first", by="kind")
    source = open_rows("c.csv", None, tmp_path)
    examples = choose_examples(few, source)
    names = ["x0", "x1", "x2", "y0", "y1", "y2", "z0", "z1", "z2", "w0"]
    assert [row["capital"] for _, row in examples] == names
    task = replace(ASK, endpoint="completion", prompt="{{ row.kind | default('?') }}?", few_shot=few)
    template = make(task, examples=examples)
    assert template.render({"kind": "y"}, 1)["prompt"] == "y? y0!\n\ny? y1!\n\ny?"
    own = replace(template, own_examples=True)
    assert own.render({"kind": "y"}, 2)["prompt"] == "y? y1!\n\ny? y2!\n\ny?", "a row is no example of itself"
    with pytest.raises(RowError, match="few_shot.by kind: too few examples have the value of a row"):
        template.render({"kind": "w"}, 1)
    with pytest.raises(RowError, match="few_shot.by kind: there is no such column"):
        template.render({}, 1)
    random = choose_examples(replace(few, order="random", seed=1), source)
    assert random != examples and {row["kind"] for _, row in random} == set("wxyz")
    with pytest.raises(JobError, match="few_shot.count is 10, but .*c.csv has 9 rows"):
        choose_examples(replace(few, count=10), source)


def test_one_question_about_many_images() -> None:
    """The rows differ by their images; without those, a question that is always the same is a mistake."""
    task = replace(ASK, prompt="What is it?", images="image")
    line = make(task, job_folder=None).render({"image": "https://example.org/a.png"}, 1)
    assert line["messages"][0]["content"][1] == {"type": "text", "text": "What is it?"}
    with pytest.raises(JobError, match="the template uses no column"):
        make(replace(task, images=None))


def test_images(tmp_path: Path) -> None:
    """Paths of the data become paths of the job file; URLs and bytes stay images."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(b"")
    task = replace(ASK, images="image")
    template = replace(make(task, tmp_path / "data"), job_folder=tmp_path / "out/x/y")
    urls = ["a.png", "https://example.com/b.png", {"bytes": b"\x89PNG", "path": None}]
    content = template.render({**ROW, "image": urls}, 1)["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in content[:-1]] == [
        "../../../data/a.png",
        "https://example.com/b.png",
        "data:image/png;base64,iVBORw==",
    ]
    assert content[-1] == {"type": "text", "text": "France?"}
    for image, says in (("no.png", "the image file does not exist"), (3, "a value is no path, URL or image")):
        with pytest.raises(RowError, match=says):
            template.render({**ROW, "image": image}, 1)


def test_sounds_come_behind_images(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"")
    task = replace(ASK, images="image", audio="sound")
    template = replace(make(task, tmp_path), job_folder=tmp_path / "out")
    row = {**ROW, "image": "https://example.com/b.png", "sound": ["a.wav", {"bytes": b"fLaC", "path": None}]}
    content = template.render(row, 1)["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "audio_url", "audio_url", "text"]
    urls = [part["audio_url"]["url"] for part in content[1:3]]
    assert urls == ["../a.wav", "data:audio/flac;base64,ZkxhQw=="]
    for sound, says in (
        ("no.wav", "the column 'sound': the sound file does not exist"),
        (3, "the column 'sound': a value is no path, URL or sound"),
        (b"PNG", "a sound is neither WAV"),
    ):
        with pytest.raises(RowError, match=says):
            template.render({**row, "sound": sound}, 1)
    with pytest.raises(RowError, match="audio sound: there is no such column"):
        template.render({**ROW, "image": "https://example.com/b.png"}, 1)


CHOICES = SuiteTask(prompt="{{ country }}:", choices="{{ options }}", expected="capital", group="country")


def test_choices() -> None:
    assert make(CHOICES).render(ROW, 1) == {
        "prompt": ["France: Rome", "France: Paris"],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
        "eval": {"match": "likeliest", "expected": 1, "context_chars": 7, "group": "France"},
    }
    task = replace(CHOICES, choices=("{{ country }}", "Rome"), delimiter="", few_shot=replace(FEW, count=1))
    line = make(task, examples=[(2, {**ROW, "country": "Peru"})]).render({**ROW, "capital": "B"}, 1)
    assert line["prompt"] == ["Peru:Paris!\n\nFrance:France", "Peru:Paris!\n\nFrance:Rome"]
    assert line["eval"]["expected"] == 1 and line["eval"]["context_chars"] == len("Peru:Paris!\n\nFrance:")


@pytest.mark.parametrize(
    ("value", "choices", "found"),
    [
        (1, ["x", "y"], 1),
        ("y", ["x", "y"], 1),
        ("1", ["x", "y"], 1),
        ("B", ["x", "y"], 1),
        ("x", ["y", "x", "x"], 1),
        ("A", ["A", "B"], 0),
        ("A", ["B", "A"], "the column 'capital': 'A' is the text of one option and the letter or index of"),
        ("0", ["x", "1"], 0),
        ("1", ["x", "1"], 1),
        ("42", ["x", "42"], 1),
        ("1", ["1", "x"], "'1' is the text of one option and the letter or index of another"),
        (" y", ["x", "y"], 1),
        ("(b)", ["x", "y"], 1),
        (2, ["x", "y"], "neither the text, the letter nor the index of a choice"),
        (-1, ["x", "y"], "neither the text"),
        (True, ["x", "y"], "neither the text"),
        ("C", ["x", "y"], "neither the text"),
        (None, ["x", "y"], "neither the text"),
    ],
)
def test_the_expected_choice(value: Any, choices: list[str], found: int | str) -> None:
    row = {**ROW, "capital": value, "options": choices}
    if isinstance(found, int):
        assert make(CHOICES).render(row, 1)["eval"]["expected"] == found
    else:
        with pytest.raises(RowError, match=found):
            make(CHOICES).render(row, 1)


def test_the_expected_choice_by_a_template() -> None:
    """`eval.expected` may compute it; a list has several that are right."""
    task = replace(CHOICES, expected=None, eval={"expected": "{{ options.index(capital) }}"})
    found = make(task).render(ROW, 1)["eval"]
    assert (found["expected"], found["group"], found["match"]) == (1, "France", "likeliest")
    several = replace(task, eval={"expected": "{{ [capital, 0] }}", "normalize": "chars"})
    found = make(several).render(ROW, 1)["eval"]
    assert (found["expected"], found["normalize"]) == ([1, 0], "chars")
    with pytest.raises(RowError, match="^eval.expected: a value is neither the text"):
        make(replace(task, eval={"expected": "{{ country }}"})).render(ROW, 1)


def test_choices_that_are_no_list() -> None:
    with pytest.raises(RowError, match="a list of at least two is needed"):
        make(CHOICES).render({**ROW, "options": "Rome"}, 1)


@pytest.mark.parametrize("choice, kind", [(["Vatican City"], "list"), ({"text": "Rome"}, "mapping")])
def test_a_choice_that_is_no_single_text(choice: Any, kind: str) -> None:
    with pytest.raises(RowError, match=f"choices: a value is a {kind}, which is no single text"):
        make(CHOICES).render({**ROW, "options": [choice, "Paris"]}, 1)


def test_the_eval_of_lines() -> None:
    task = replace(ASK, eval={"match": "number", "tolerance": "{{ 1 / 4 }}"})
    assert make(task).render(ROW, 1)["eval"] == {"match": "number", "tolerance": 0.25}
    judged = replace(ASK, judge={"prompt": "x"}, group="two words")
    assert build_eval(judged) == {"match": "judge", "group": '{{ row["two words"] | string }}'}
    assert build_eval(replace(judged, expected="capital", match="exact", group=None)) == {}
    assert json.dumps(build_eval(ASK)) == "{}"


def test_a_scorers_file_is_relative_to_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In job lines, to the working directory; modules are found from there in both."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert locate_scorer("own.py:words", tmp_path / "suites") == "../suites/own.py:words"
    assert locate_scorer("own.py:words", Path()) == "own.py:words"
    assert locate_scorer(f"{tmp_path}/own.py:words", Path("suites")) == f"{tmp_path}/own.py:words"
    assert locate_scorer("own:words", tmp_path / "suites") == "own:words"
    task = replace(ASK, eval={"scorer": "own.py:words"})
    parts = dict(compile_parts(task, tmp_path / "suites", str))
    assert not isinstance(parts["eval"], JobError)
    found = parts["eval"].render({}, 1)
    assert found == {"eval": {"scorer": "../suites/own.py:words"}}
