"""The tasks of the box beside lm-evaluation-harness' own, with the same model on the same rows: prompts,
answers and scores are equal. The rows of data/ were written for these tests in the data sets' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxrun.evals.tasks.task_box import read_task
from mlxrun.jobs.scoring.likeliest import sum_continuations
from tests.helpers.bubblewrap import find_problem
from tests.helpers.harness_scripts import run_harness_script

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"
SUBJECTS = ("anatomy", "astronomy", "high_school_geography", "us_foreign_policy")
LIKELIEST = ("arc", "hellaswag", "truthfulqa", "truthfulqa_mc2")
# Those that run programs need a sandbox.
GENERATED = ("gsm8k", "ifeval", *(() if find_problem() else ("humaneval", "mbpp")))
SEEN = ("mmmu_val", "docvqa_val")
ANSWERED = 6  # rows whose answers are generated, which take most of the time; all have given answers too
FILES = {
    "arc": ("arc/arc_challenge.yaml", "test"),
    "gsm8k": ("gsm8k/gsm8k-cot.yaml", "test"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "humaneval": ("humaneval/humaneval.yaml", "test"),
    "ifeval": ("ifeval/ifeval.yaml", "train"),
    "mbpp": ("mbpp/mbpp.yaml", "test"),
    "truthfulqa": ("truthfulqa/truthfulqa_mc1.yaml", "validation"),
    "truthfulqa_mc2": ("truthfulqa/truthfulqa_mc2.yaml", "validation"),
}
# Answers that the model of the test does not give: right, wrong, and written in many ways.
NUMBERS = ("The answer is {}.", "It is {}.\nThe answer is {}. The end", "The answer is ${}", "I get {}", "")
ENDS = ("{}", "    return 7\n", "{}\nimport sys\nsys.exit()", "  return (", "")
PROGRAMS = ("{}", "{}\nassert False", "def f(): pass", "{}\n1 / 0", "import math\n{}", "")
# To open questions and to those with letters; of an answer without a letter the harness counts a random one.
COLOURS = {
    "open": ("The answer is 1.", "1", "two", "So the result = 1.0"),
    "multiple-choice": ("(C) red", "C", "It is red, as far as one can see.", "B", "blue or (C)"),
}
TEXTS = (
    "Sure, gladly.\nrain falls",
    "A bridge and a bridge over the moss and stone. That is all.",
    '{"name": "Tom", "age": 3}',
    '"Oslo"',
    "<<Soup>>\n* one\n* two\n* three\n\nP.S. [name] and [town]",
    "SNOW FELL ON THE ROOFS",
    "one\n******\ntwo",
    "Sure!\nzebras zoom and buzz *so* *well*\n***\nmore",
    "",
)


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def get_file(name: str) -> str:
    """The name of the file with the rows of a task."""
    return name.removesuffix("_mc2")


def write_subjects(folder: Path) -> dict[str, Any]:
    """The task of the harness for each subject of mmlu, with its rows in files of their own."""
    found = {}
    for subject in SUBJECTS:
        files = {}
        for name, split in (("mmlu", "test"), ("mmlu_dev", "dev")):
            rows = [row for row in read_rows(name) if row["subject"] == subject]
            path = folder / f"{name}-{subject}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            files[split] = str(path)
        found[f"mmlu_{subject}"] = {
            "file": f"mmlu/default/mmlu_{subject}.yaml",
            "data": files,
            "shots": 5,
        }
    return found


def list_answers(name: str) -> dict[str, Any]:
    """Given answers to all rows of a task, and what its scorer expects."""
    rows, forms, texts = read_rows(name), TEXTS, [""] * 20
    expected: list[Any] = rows
    if name == "gsm8k":
        expected = [row["answer"].split("####")[-1].strip() for row in rows]
        forms, texts = NUMBERS, [number if at % 3 else "7" for at, number in enumerate(expected)]
    elif name == "humaneval":
        forms, texts = ENDS, [row["canonical_solution"] for row in rows]
    elif name == "mbpp":
        expected = [row["test_list"] for row in rows]
        forms, texts = PROGRAMS, [row["code"] for row in rows]
    answers = [forms[at % len(forms)].replace("{}", text) for at, text in enumerate(texts)]
    return {"answers": answers, "expected": expected}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("standard")


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    """What scripts/run_standard_tasks.py has found."""
    tasks: dict[str, Any] = write_subjects(folder)
    used = {name: each for name, each in FILES.items() if name in LIKELIEST + GENERATED}
    for name, (file, split) in used.items():
        path = str(DATA / f"{get_file(name)}.jsonl")
        splits = dict.fromkeys({split, "train"} if name in ("arc", "hellaswag") else {split}, path)
        tasks[name] = {"file": file, "data": splits}
    tasks["ifeval"]["is_chat"] = True
    for name in GENERATED:
        scorer = read_task(name).node.strip_origins()["eval"]["scorer"]
        tasks[name] |= {"scorer": scorer, "limit": ANSWERED, **list_answers(name)}
    names = ["mmlu", *used, *SEEN]
    arguments = ["--tasks", ",".join(names), "--model", "embedded"]
    for name in names:
        path = DATA / f"{get_file(name)}.jsonl"
        if name in GENERATED:
            path = folder / path.name
            path.write_text("".join(json.dumps(row) + "\n" for row in read_rows(name)[:ANSWERED]))
        arguments += ["--data", f"{name}={path}"]
    arguments += ["--examples", f"mmlu={DATA / 'mmlu_dev'}.jsonl"]
    rows = read_rows("mmmu_val")
    kinds = [COLOURS[row["question_type"]] for row in rows]
    answers = [kind[at // 2 % len(kind)] for at, kind in enumerate(kinds)]
    images = {"rows": rows, "answers": answers}
    given = {"model": "embedded", "arguments": arguments, "tasks": tasks, "images": images}
    found = run_harness_script("run_standard_tasks.py", given, folder)
    assert found["code"] == 0
    mmlu = iter(zip(*(found["run"].pop(f"mmlu_{subject}") for subject in SUBJECTS), strict=True))
    order = [row["subject"] for row in read_rows("mmlu")[: len(SUBJECTS)]]
    found["run"]["mmlu"] = [rows[SUBJECTS.index(subject)] for rows in mmlu for subject in order]
    return found


def read_run(folder: Path, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The lines of the run of a task with their records."""
    cell = folder / f"out/embedded/{name}/seed-0"
    lines = [json.loads(line) for line in (cell / "job.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (cell / "job.out.jsonl").read_text().splitlines()]
    assert len(lines) == (ANSWERED if name in GENERATED else 20)
    return list(zip(lines, records, strict=True))


def get_scores(found: Mapping[str, Any]) -> dict[str, float]:
    """The scores by their names in the harness, where a single one is of programs."""
    return dict(found.get("scores") or {"pass@1": float(found["score"])})


def select_scores(found: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Those that the harness gives the same row. It names the one of programs as its function."""
    given = {"pass@1" if "pass" in key else key: value for key, value in theirs["scores"].items()}
    given = {key: value["pass@1"] if isinstance(value, dict) else value for key, value in given.items()}
    return {key: given[key] for key in get_scores(found)}


def get_answer(record: Mapping[str, Any]) -> str:
    choice = record["response"]["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("name", ["mmlu", *LIKELIEST])
def test_choices_are_equal(name: str, found: Any, folder: Path) -> None:
    """The harness is asked for the same continuations of the same contexts, and gets the same likelihoods."""
    differences = 0
    for (line, record), theirs in zip(read_run(folder, name), found["run"][name], strict=True):
        assert line["prompt"] == ["".join(pair) for pair in theirs["arguments"]]
        contexts = {len(pair[0]) for pair in theirs["arguments"]}
        assert contexts == {line["eval"]["context_chars"]}
        body = record["response"]["body"]
        ours = [each.logprob for each in sum_continuations(body["choices"], *contexts)]
        likelihoods = [float(each[0][0]) for each in theirs["answer"]]
        assert ours == pytest.approx(likelihoods, abs=1e-3)
        scores = record["eval"]["scores"]
        if name == "truthfulqa_mc2":
            assert record["eval"]["score"] == pytest.approx(float(theirs["scores"]["acc"]), abs=1e-4)
        else:
            assert {key: scores[key] for key in theirs["scores"]} == theirs["scores"]
        differences += len(set(scores.values())) > 1
    assert differences or name in ("mmlu", "truthfulqa"), "lengths of choices matter for some rows"


@pytest.mark.parametrize("name", GENERATED)
def test_answers_are_equal(name: str, found: Any, folder: Path) -> None:
    for (line, record), theirs in zip(read_run(folder, name), found["run"][name], strict=True):
        ((context, options),) = theirs["arguments"]
        if name == "ifeval":
            assert line["messages"][0]["content"] in context
        else:
            assert (line["prompt"], line["stop"]) == (context, options["until"])
        assert line["max_tokens"] == options.get("max_gen_toks", 256)
        assert line["temperature"] == options.get("temperature", 0) == 0
        assert [[get_answer(record)]] == theirs["answer"]
        assert get_scores(record["eval"]) == select_scores(record["eval"], theirs)


@pytest.mark.parametrize("name", GENERATED)
def test_scorers_are_equal(name: str, found: Any) -> None:
    """Answers of all kinds get the scores of the harness."""
    seen: set[tuple[Any, ...]] = set()
    for ours, theirs in zip(found["scored"][name], found["given"][name], strict=True):
        scores = get_scores(ours)
        assert scores == select_scores(ours, theirs)
        assert ours["score"] == next(iter(scores.values()))
        seen.add(tuple(scores.values()))
    assert len(seen) == 1 + len(scores), "right by all rules, by one, and wrong"


def test_questions_about_images_are_equal(found: Any, folder: Path) -> None:
    """But that images come first here, and the text keeps their numbers."""
    theirs = found["mmmu"]
    assert len(set(map(len, theirs["images"]))) > 1
    rows = zip(read_run(folder, "mmmu_val"), theirs["prompts"], theirs["images"], strict=True)
    for (line, record), prompt, images in rows:
        *pictures, text = line["messages"][0]["content"]
        assert re.sub("<image [1-7]>", "<image>", text["text"]) == prompt
        assert len(pictures) == len(images) and {each["type"] for each in pictures} == {"image_url"}
        assert record["eval"]["score"] in (0, 1)
    assert theirs["ours"] == theirs["theirs"] and set(theirs["ours"]) == {0, 1}


def test_pages_are_asked_about(found: Any, folder: Path) -> None:
    for line, record in read_run(folder, "docvqa_val"):
        picture, text = line["messages"][0]["content"]
        assert picture["type"] == "image_url" and text["text"].startswith("Which colour is page ")
        assert text["text"].endswith("?\nAnswer the question using a single word or phrase.")
        assert "note" not in record["eval"] and record["eval"]["expected"] == ["red", "Red colour"]
