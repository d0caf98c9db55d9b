"""Jobs made from tables: ids, expected answers, and problems that are said once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_maker import ColumnChoice, JobMaker
from mlxrun.jobs.lines.line_template import LineTemplate, make_message_template
from tests.helpers.batch_fakes import Bench, by_id

CITIES = "country,capital,area\nFrance,Paris,EU\nJapan,Tokyo,Asia\n"


def make(
    folder: Path, table: str, text: str = "Capital of {{ country }}?", **columns: Any
) -> list[dict[str, Any]]:
    path = folder / ("t.jsonl" if table.startswith("{") else "t.csv")
    path.write_text(table)
    body = columns.pop("body", {})
    out = io.BytesIO()
    maker = JobMaker(make_message_template(text, "--prompt"), ColumnChoice(**columns), body)
    count = maker.write_lines(path, out)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == count
    return lines


async def test_a_job_that_runs(tmp_path: Path) -> None:
    lines = make(tmp_path, CITIES, expected="capital", match="contains", group="area", body={"max_tokens": 9})
    assert lines[0] == {
        "id": "row-1",
        "messages": [{"role": "user", "content": "Capital of France?"}],
        "max_tokens": 9,
        "eval": {"expected": "Paris", "match": "contains", "group": "EU"},
    }
    (tmp_path / "job.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bench = Bench(tmp_path / "job.jsonl")
    outcome = await bench.run()
    assert outcome.exit_code == 0 and sorted(by_id(bench.paths.out)) == ["row-1", "row-2"]
    assert sorted(outcome.scores.groups) == ["Asia", "EU"]


def test_ids(tmp_path: Path) -> None:
    """A column that is named, one called custom_id or id, that of the template, or the row's number."""
    assert [line["id"] for line in make(tmp_path, CITIES, id="country")] == ["France", "Japan"]
    table = '{"id": 7, "country": "x"}\n{"id": "", "country": "y"}\n{"country": "z"}\n'
    assert [line["id"] for line in make(tmp_path, table)] == ["7", "row-2", "row-3"]
    path = tmp_path / "t.csv"
    template = LineTemplate({"id": "q-{{ country }}", "prompt": "x"}, "t")
    for choice, ids in (
        (ColumnChoice(), ["q-France", "q-Japan"]),
        (ColumnChoice("capital"), ["Paris", "Tokyo"]),
    ):
        out = io.BytesIO()
        JobMaker(template, choice).write_lines(path, out)
        assert [json.loads(line)["id"] for line in out.getvalue().splitlines()] == ids


def test_an_empty_cell_is_no_expected_answer(tmp_path: Path) -> None:
    """It may be a missing one; JSONL can say that it is not."""
    table = "country,capital,area\nFrance,,EU\nJapan,Tokyo,Asia\nPeru,,x\n"
    with pytest.raises(JobError, match=r"t\.csv:2: the column 'capital' is empty: .* \(2 rows"):
        make(tmp_path, table, expected="capital")
    (line,) = make(tmp_path, '{"country": "x", "capital": ""}\n', expected="capital")
    assert line["eval"]["expected"] == ""


def test_expected_json_is_parsed(tmp_path: Path) -> None:
    (line,) = make(tmp_path, '{"country": "x", "e": "[1, 2]"}', expected="e", match="json")
    assert line["eval"] == {"expected": [1, 2], "match": "json"}
    (line,) = make(tmp_path, '{"country": "x", "e": [1, 2]}', expected="e", match="json")
    assert line["eval"]["expected"] == [1, 2]
    text = json.dumps({"country": "x", "e": '{"type": "array"}'})
    (line,) = make(tmp_path, text, expected="e", match="json_schema")
    assert line["eval"]["expected"] == {"type": "array"}


@pytest.mark.parametrize(
    ("table", "options", "says"),
    [
        (
            "name\n" + "x\n" * 200,
            {},
            [
                ":2: the template cannot be filled in: 'country' is undefined "
                "(200 rows, of which this is the first)",
                ": the columns are 'name'; nothing was written",
            ],
        ),
        (
            CITIES,
            {"expected": "capitol"},
            [
                ":2: --expected capitol: there is no such column (2 rows, of which this is the first)",
                ": the columns are 'country', 'capital', 'area'; nothing was written",
            ],
        ),
        (
            '{"country": "a"}\n[]\n{"land": 1}\n{"country": "b"}\n{}\nx\n',
            {},
            [
                ":3: the template cannot be filled in: 'country' is undefined "
                "(2 rows, of which this is the first)",
                ":2: not a JSON object",
                ":6: not JSON",
                ": the columns are 'country', 'land'; nothing was written",
            ],
        ),
        (
            "country,id\na,1\nb,1\nc,1\n",
            {},
            [
                ":3: its id occurs in an earlier row (2 rows, of which this is the first)",
                ": the columns are 'country', 'id'; nothing was written",
            ],
        ),
        (
            CITIES,
            {"expected": "capital", "match": "number"},
            [
                ":2: the column 'capital': eval.expected must be a number, or a list of numbers, "
                "because eval.match is number (2 rows, of which this is the first)",
                ": the columns are 'country', 'capital', 'area'; nothing was written",
            ],
        ),
        (
            CITIES,
            {"expected": "capital", "match": "json"},
            [
                ":2: the column 'capital' is not JSON (2 rows, of which this is the first)",
                ": the columns are 'country', 'capital', 'area'; nothing was written",
            ],
        ),
        ("country\n", {}, [": the table has no rows"]),
        (
            CITIES,
            {"body": {"max_token": 20}},
            [
                ":2: no model can answer the line: max_token: unknown parameter (did you mean 'max_tokens'?) "
                "(2 rows, of which this is the first)",
                ": the columns are 'country', 'capital', 'area'; nothing was written",
            ],
        ),
        ('{"a\n', {}, [":1: not JSON", ": no row could be read; nothing was written"]),
    ],
)
def test_each_problem_is_said_once(
    tmp_path: Path, table: str, options: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        make(tmp_path, table, **options)
    name = tmp_path / ("t.jsonl" if table.startswith("{") else "t.csv")
    assert str(caught.value).splitlines() == [f"{name}{text}" for text in says]


def test_many_kinds_of_problems_are_cut(tmp_path: Path) -> None:
    table = "country,e\n" + "".join(f"x,{'(' * n}\n" for n in range(1, 31))
    with pytest.raises(JobError) as caught:
        make(tmp_path, table, expected="e", match="regex")
    assert len(str(caught.value).splitlines()) <= 22


def make_lines(folder: Path, line: dict[str, Any], **columns: Any) -> list[dict[str, Any]]:
    path, out = folder / "t.csv", io.BytesIO()
    path.write_text(CITIES)
    JobMaker(LineTemplate(line, "t"), ColumnChoice(**columns)).write_lines(path, out)
    return [json.loads(data) for data in out.getvalue().splitlines()]


def test_expected_is_added_to_the_eval_of_the_template(tmp_path: Path) -> None:
    line = {"prompt": "{{ country }}", "eval": {"match": "contains", "group": "{{ area }}"}}
    found = make_lines(tmp_path, line, expected="capital")
    assert [each["eval"] for each in found] == [
        {"expected": "Paris", "match": "contains", "group": "EU"},
        {"expected": "Tokyo", "match": "contains", "group": "Asia"},
    ]
    found = make_lines(tmp_path, {"prompt": "{{ country }}", "eval": {"group": "g"}}, expected="capital")
    assert found[0]["eval"] == {"expected": "Paris", "match": "exact", "group": "g"}


@pytest.mark.parametrize(
    ("given", "columns", "says"),
    [
        ({"expected": "x"}, {}, "the template's eval has `expected` already, so --expected cannot be given"),
        ({"match": "regex"}, {"match": "exact"}, "the template's eval has `match` already"),
        ({"group": "a"}, {"group": "area"}, "the template's eval has `group` already"),
        ("yes", {}, "the template's eval is not an object"),
        ({"grp": "a"}, {}, "eval.grp is not known"),
    ],
)
def test_an_eval_is_not_replaced(tmp_path: Path, given: Any, columns: dict[str, str], says: str) -> None:
    with pytest.raises(JobError, match=says.replace("(", r"\(")):
        make_lines(tmp_path, {"prompt": "{{ country }}", "eval": given}, expected="capital", **columns)


def test_numbers_of_a_csv_file_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("q,limit\na,20\n")
    line = {"messages": [{"role": "user", "content": "{{ q }}"}], "max_tokens": "{{ limit }}"}
    with pytest.raises(JobError, match="no model can answer the line: max_tokens"):
        JobMaker(LineTemplate(line, "t"), ColumnChoice()).write_lines(path, io.BytesIO())
    line["max_tokens"] = "{{ limit | int }}"
    out = io.BytesIO()
    JobMaker(LineTemplate(line, "t"), ColumnChoice()).write_lines(path, out)
    assert json.loads(out.getvalue())["max_tokens"] == 20


def test_progress_is_reported(tmp_path: Path) -> None:
    path, seen = tmp_path / "t.csv", list[int]()
    path.write_text("q\n" + "a\n" * 2001)
    maker = JobMaker(make_message_template("{{ q }}", "t"), ColumnChoice())
    assert maker.write_lines(path, io.BytesIO(), seen.append) == 2001
    assert seen == [1000, 2000]


def test_ids_and_groups_that_are_no_text(tmp_path: Path) -> None:
    for column in ("id", "group"):
        with pytest.raises(JobError, match="a value is null"):
            make(tmp_path, '{"country": "x", "e": "y", "k": null}', expected="e", **{column: "k"})
        with pytest.raises(JobError, match="a value is nan"):
            make(tmp_path, '{"country": "x", "e": "y", "k": NaN}', expected="e", **{column: "k"})
