"""The job files of cells, and mistakes in templates and data that are found before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.suite_files import CAPITALS, find_problems, read_cells, write_suite


def test_job_files(tmp_path: Path) -> None:
    """Cells with the same lines have equal files; one that is right is not touched."""
    text = CAPITALS.replace("{tiny: }", "{tiny: , other: }") + "        limit: 2\n    seeds: [1, 2]\n"
    _, cells, jobs = read_cells(write_suite(tmp_path, text))
    path = tmp_path / "out/a/job.jsonl"
    digest = jobs.write(cells[0], path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {
            "id": f"row-{number}",
            "messages": [{"role": "user", "content": f"Capital of {country}?"}],
            "eval": {"expected": capital, "match": "exact"},
        }
        for number, (country, capital) in enumerate([("France", "Paris"), ("Japan", "Tokyo")], 1)
    ]
    before = path.stat().st_ino
    assert jobs.write(cells[3], path) == digest and path.stat().st_ino == before
    jobs.copy(path, tmp_path / "out/b/job.jsonl")
    assert (tmp_path / "out/b/job.jsonl").read_bytes() == path.read_bytes()
    path.write_text("")
    jobs.copy(tmp_path / "out/b/job.jsonl", path)
    assert path.stat().st_size and not list(tmp_path.rglob("*.tmp"))


def test_one_schema_is_expected_of_every_row(tmp_path: Path) -> None:
    text = """
    models: {tiny: }
    tasks:
      a:
        data: cities.csv
        prompt: "The capital of {{ country }}, as JSON"
        expected: {type: object, required: [capital]}
        match: json_schema
        group: country
    """
    _, cells, jobs = read_cells(write_suite(tmp_path, text))
    jobs.write(cells[0], tmp_path / "job.jsonl")
    found = [json.loads(line)["eval"] for line in (tmp_path / "job.jsonl").read_text().splitlines()]
    schema = {"type": "object", "required": ["capital"]}
    assert found[0] == {"expected": schema, "match": "json_schema", "group": "France"} and len(found) > 1
    choices = text.replace("match: json_schema", "choices: [a, b]")
    assert any("`choices` need a column" in each for each in find_problems(write_suite(tmp_path, choices)))
    wrong = text.replace("required: [capital]", "required: 3")
    assert any("eval.expected" in each for each in find_problems(write_suite(tmp_path, wrong)))


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    """All of them at once, at their places in the suite; a template may have a default."""
    text = """
    models: {tiny: , other: }
    tasks:
      a:
        data: cities.csv
        prompt: "{{ contry }} {{ hint | default('none') }}"
        system: "In {{ aera }}"
        expected: captial
        group: region
        id: nr
        few_shot: {count: 1, answer: "{{ cap }}"}
      b: {data: cities.csv, prompt: "{{ hint | default('none') }}{{ row.country }}"}
    seeds: [1, 2]
    """
    assert find_problems(write_suite(tmp_path, text)) == [
        "suite.yaml:5:13: tasks.a.prompt: cities.csv has no column 'contry' (did you mean 'country'?)",
        "suite.yaml:6:13: tasks.a.system: cities.csv has no column 'aera' (did you mean 'area'?)",
        "suite.yaml:7:15: tasks.a.expected: cities.csv has no column 'captial' (did you mean 'capital'?)",
        "suite.yaml:8:12: tasks.a.group: cities.csv has no column 'region'",
        "suite.yaml:9:9: tasks.a.id: cities.csv has no column 'nr'",
        "suite.yaml:10:34: tasks.a.few_shot.answer: cities.csv has no column 'cap'",
    ]


@pytest.mark.parametrize("models", ["{tiny: {set: {model.pth: x}}}", "{tiny: 3}", "{}"])
def test_data_is_checked_whatever_is_wrong_with_the_models(tmp_path: Path, models: str) -> None:
    text = CAPITALS.replace("{tiny: }", models).replace("expected: capital", "expected: captial")
    problems = find_problems(write_suite(tmp_path, text))
    assert len(problems) == 2 and any("cities.csv has no column 'captial'" in each for each in problems)


MISTAKES = """
    models:
      one: {set: {model.path: ./nope, samplin.temperature: 0}}
      two: {cnfig: none.yaml, set: {model.dtype: float99}}
    tasks:
      a: {data: cities.csv, promt: "{{ contry }}", expected: capital, match: numbr}
      b: {data: cities.csv, prompt: "{{ area }", generation: {max_tokns: 3},
          few_shott: {answr: "{{ cap }}", count: 1}}
      c: {data: none.csv, prompt: "{{ area }}", match: number}
    seeds: [1, 1]
    vary: {model.dtyp: [auto], sampling.temperature: [0, 0]}
"""


def test_mistakes_of_all_kinds_are_found_at_once(tmp_path: Path) -> None:
    """Unknown keys, values, columns, templates, files, configs. An unknown key counts as the one that is
    meant; no row is read for the tasks, which would be refused for these mistakes again."""
    found = find_problems(write_suite(tmp_path, MISTAKES))
    assert [each.partition(" (did you mean")[0].partition(" is not one of")[0] for each in found] == [
        "suite.yaml:3:9: models.two.cnfig: unknown key",
        "suite.yaml:3:16: models.two.config: none.yaml: there is no such file",
        "suite.yaml:5:25: tasks.a.promt: unknown key",
        "suite.yaml:5:32: tasks.a.prompt: cities.csv has no column 'contry'",
        "suite.yaml:5:74: tasks.a.match: 'numbr'",
        "suite.yaml:6:59: tasks.b.generation.max_tokns: unknown parameter",
        "suite.yaml:7:7: tasks.b.few_shott: unknown key",
        "suite.yaml:7:19: tasks.b.few_shot.answr: unknown key",
        "suite.yaml:7:26: tasks.b.few_shot.answer: cities.csv has no column 'cap'",
        "suite.yaml:8:13: tasks.c.data: none.csv: there is no such file",
        "suite.yaml:8:52: tasks.c.match: it needs `expected`",
        "suite.yaml:9:8: seeds: it has a value twice",
        "suite.yaml:10:8: vary.model.dtyp: unknown key",
        "suite.yaml:10:28: vary.sampling.temperature: it has a value twice",
        "suite.yaml:2:27: model.path: nope is neither a folder nor a .gguf file",
        "suite.yaml:2:35: samplin: unknown key",
        "suite.yaml:3:46: model.dtype: 'float99'",
        "suite.yaml:6:33: tasks.b.prompt: line 1 of the template: unexpected '}'",
    ]


def test_configs_are_checked_if_no_task_is_left(tmp_path: Path) -> None:
    found = find_problems(write_suite(tmp_path, "models: {a: {set: {model.pth: x}}}\ntasks: {t: 3}\n"))
    assert len(found) == 2 and "model.pth: unknown key" in found[1]


def test_rows_that_are_wrong(tmp_path: Path) -> None:
    """Each kind once, with the first row and the number of rows, by the line in the data."""
    text = CAPITALS.replace("cities.csv", "c.jsonl") + "        match: number\n    seeds: [1, 2]\n"
    rows = [{"country": "A", "capital": 1}, {"country": "B", "capital": "x"}, {"capital": 3}]
    table = "".join(json.dumps(row) + "\n" for row in [*rows, {"country": "C", "capital": "y"}])
    assert find_problems(write_suite(tmp_path, text, c_jsonl=table)) == [
        "c.jsonl:2: tasks.capitals: the column 'capital': eval.expected must be a number, "
        "or a list of numbers, because eval.match is number (2 rows, of which this is the first)",
        "c.jsonl:3: tasks.capitals: the template cannot be filled in: 'country' is undefined",
        "c.jsonl: the columns are 'country', 'capital'; nothing was written",
    ]


@pytest.mark.parametrize("missing", [1, 2])
def test_a_column_that_some_rows_lack(tmp_path: Path, missing: int) -> None:
    """The row is named, also if it is the first one; a column that no row has is a mistake of the suite."""
    rows = ['{"country": "A", "area": "x"}\n', '{"country": "B"}\n']
    text = CAPITALS.replace("cities.csv", "c.jsonl").replace("country", "area")
    text = text.replace("capital\n", "country\n")
    table = "".join(rows if missing == 2 else reversed(rows))
    assert find_problems(write_suite(tmp_path, text, c_jsonl=table)) == [
        f"c.jsonl:{missing}: tasks.capitals: the template cannot be filled in: 'area' is undefined",
        "c.jsonl: the columns are 'country', 'area'; nothing was written",
    ]
    (problem,) = find_problems(write_suite(tmp_path, text.replace("{{ area }}", "{{ arae }}"), c_jsonl=table))
    assert problem.endswith("tasks.capitals.prompt: c.jsonl has no column 'arae' (did you mean 'area'?)")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("cities.csv", "town.csv"), "4:11: tasks.capitals.data: town.csv: there is no such file"),
        (("cities.csv", "empty.csv"), "empty.csv: the file is empty; its first line must have the names"),
        (
            ("{{ country }}", "{{ country }"),
            "5:13: tasks.capitals.prompt: line 1 of the template: unexpected '}'",
        ),
        (("{{ country }}", "France"), "5:13: tasks.capitals.prompt: the template uses no column"),
        (
            ("expected: capital", "generation: {max_token: 3}"),
            "6:18: tasks.capitals.generation.max_token: unknown parameter (did you mean 'max_tokens'?)",
        ),
        (
            ("expected: capital", "generation: {temperature: hot}"),
            "6:18: tasks.capitals.generation.temperature: expected number, got string",
        ),
        (
            ("prompt:", "template: x.jinja #"),
            "x.jinja: cannot read the template: No such file",
        ),
        (
            ("expected: capital", "few_shot: {answer: '{{ capital }}', count: 9}"),
            "6:15: tasks.capitals.few_shot: few_shot.count is 9, but cities.csv has 3 rows",
        ),
        (
            ("expected: capital", "few_shot: {answer: '{{ capital }}', count: 3}"),
            "few_shot.count is 3, but cities.csv has 3 rows, and none is an example of itself",
        ),
        (
            ("expected: capital", "few_shot: {answer: '{{ capital }}', data: no.csv}"),
            "tasks.capitals.few_shot.data: no.csv: there is no such file",
        ),
        (
            ("expected: capital", "prepare: 'no_such_module:change'"),
            "6:14: tasks.capitals.prepare: function 'no_such_module:change': cannot be imported",
        ),
        (
            ("expected: capital", "use: gsm9k"),
            "6:10: tasks.capitals.use: there is no task 'gsm9k' (did you mean 'gsm8k'?); mlxrun has arc, ",
        ),
        (
            ("expected: capital", "eval: {scorer: 'no_such_module:score'}"),
            "6:20: tasks.capitals.eval.scorer: scorer 'no_such_module:score': cannot be imported",
        ),
        (
            (
                "expected: capital",
                "judge: {prompt: '{{ answer }} {{ what }}', verdict: {choices: {A: 1, B: 0}}}",
            ),
            "6:12: tasks.capitals.judge: 'what' is not a variable of a judge",
        ),
        (("expected: capital", "judge: none.yaml"), "none.yaml"),
        (
            ("expected: capital", "images: area"),
            "cities.csv:2: tasks.capitals: the column 'area': the image file",
        ),
    ],
)
def test_problems_of_tasks(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    problems = find_problems(write_suite(tmp_path, CAPITALS.replace(*change), empty_csv=""))
    assert any(each.startswith((says, f"suite.yaml:{says}")) or says in each for each in problems), problems
    assert len(problems) <= 2


@pytest.mark.parametrize(
    ("text", "says"), [("", "the file is empty; its first"), ("country,capital\n", "the table has no rows")]
)
def test_an_empty_table_is_named_beside_other_mistakes(tmp_path: Path, text: str, says: str) -> None:
    suite = CAPITALS.replace("cities.csv", "empty.csv").replace("{{ country }}", "France")
    problems = find_problems(write_suite(tmp_path, suite, empty_csv=text))
    assert [each.partition(": tasks")[0] for each in problems] == ["suite.yaml:4:11", "suite.yaml:5:13"]
    assert f"capitals.data: empty.csv: {says}" in problems[0] and "uses no column" in problems[1]


def test_images_may_be_read_where_the_data_is(tmp_path: Path) -> None:
    (tmp_path / "Paris").write_bytes(b"")
    text = CAPITALS.replace("expected: capital", "images: capital\n        limit: 1")
    _, (cell,), jobs = read_cells(write_suite(tmp_path, text))
    assert jobs.add_media_folder(cell).media.roots == (".", str(tmp_path.resolve()))
    jobs.write(cell, tmp_path / "suite.out" / cell.name / "job.jsonl")
    line = json.loads((tmp_path / "suite.out" / cell.name / "job.jsonl").read_text())
    assert line["messages"][0]["content"][0]["image_url"]["url"] == "../../../../Paris"
    _, (cell,), jobs = read_cells(write_suite(tmp_path, CAPITALS))
    assert jobs.add_media_folder(cell) is cell.config


def test_images_of_rows_in_the_suite_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    text = """
    models: {tiny: }
    tasks:
      a: {rows: [{image: a.png}], images: image, prompt: 'What is it?'}
    """
    _, (cell,), jobs = read_cells(write_suite(tmp_path, text))
    assert jobs.add_media_folder(cell).media.roots == (".", str(tmp_path.resolve()))
    jobs.write(cell, tmp_path / "suite.out" / cell.name / "job.jsonl")
    line = json.loads((tmp_path / "suite.out" / cell.name / "job.jsonl").read_text())
    assert line["messages"][0]["content"][0]["image_url"]["url"] == "../../../../a.png"
