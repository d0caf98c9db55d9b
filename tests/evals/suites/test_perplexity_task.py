"""A task whose texts are measured: its data, its lines, its cells, and what has no effect on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.evals.suites.suite_manifest import print_matrix
from mlxrun.jobs.scoring.perplexity import BITS_PER_BYTE
from tests.helpers.batch_fakes import read
from tests.helpers.suite_bench import SuiteBench
from tests.helpers.suite_files import find_problems, read_cells, write_suite

PROSE = """
    models: {tiny: }
    tasks:
      prose:
        data: prose.txt
        prompt: "{{ text }}"
        match: perplexity
        generation: {prompt_windows: {size: 8, stride: 4}}
    seeds: [1, 2]
"""
TEXT = "One line.\n\nAnother line, with more words.\n"


async def test_a_text_file_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds change nothing; the text is as it is in the file."""
    bench = SuiteBench(write_suite(tmp_path, PROSE, prose_txt=TEXT))
    assert await bench.run() == 0
    (cell,) = bench.read()["cells"]
    assert cell["name"] == "tiny/prose/seed-1"
    out = bench.folder / cell["name"] / "job.out.jsonl"
    (line,) = read(out.with_name("job.jsonl"))
    assert line == {
        "id": "row-1",
        "prompt": TEXT,
        "prompt_windows": {"size": 8, "stride": 4},
        "echo": True,
        "logprobs": 0,
        "max_tokens": 0,
        "eval": {"match": "perplexity"},
    }
    (record,) = read(out)
    assert record["eval"]["sums"]["bytes"] == len(TEXT.encode())
    found = cell["scores"]["total"]
    assert found["measure"] == {"unit": "bits/byte", "better": "lower", "aggregate": "bits / bytes"}
    assert found["perplexity"]["bytes"] == len(TEXT.encode()) and found["share"] is None
    shown = BITS_PER_BYTE.format(found["value"])
    assert found["value"] == pytest.approx(record["eval"]["sums"]["bits"] / len(TEXT.encode()))
    assert any(shown in text for text in bench.said)
    with (tmp_path / "matrix").open("w") as stream:
        print_matrix(bench.read()["cells"], stream)
    assert f"  {shown}" in (tmp_path / "matrix").read_text()


async def test_rows_of_a_table_are_texts(tmp_path: Path) -> None:
    """With an interval over them, in groups, and several windows as a setting."""
    text = PROSE.replace("prose.txt", "pages.jsonl").replace(
        "match: perplexity", "match: perplexity\n        group: book"
    )
    text += "    vary: {generation.temperature: [0, 1], sampling.top_p: [1, 0.5]}\n"
    rows = "".join(
        json.dumps({"text": f"Page {at} " * at, "book": f"b{at % 2}"}) + "\n" for at in (1, 2, 3, 4)
    )
    _, cells, _ = read_cells(write_suite(tmp_path, text, pages_jsonl=rows))
    assert [cell.variant for cell in cells] == ["seed-1,temperature-0", "seed-1,temperature-1"]
    bench = SuiteBench(tmp_path / "suite.yaml")
    assert await bench.run("tiny/prose/seed-1,temperature-0") == 0
    scores = bench.read()["cells"][0]["scores"]
    assert set(scores["groups"]) == {"b0", "b1"}
    low, high = scores["total"]["interval"]
    assert low < scores["total"]["value"] < high


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("expected: text", "tasks.prose.expected: it would have no effect on `perplexity`"),
        ("few_shot: {answer: x}", "tasks.prose.few_shot: it would have no effect on `perplexity`"),
        ("judge: later", "tasks.prose.judge: it would have no effect on `perplexity`"),
        ("system: Hi", "tasks.prose.system: only chats have system, and `perplexity` is that of a text"),
        (
            "eval: {tolerance: 1}",
            "tasks.prose.eval.tolerance: it belongs to the match number, not to perplexity",
        ),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path: Path, change: str, says: str) -> None:
    text = PROSE.replace("match: perplexity", f"match: perplexity\n        {change}")
    assert any(says in problem for problem in find_problems(write_suite(tmp_path, text, prose_txt=TEXT)))


def test_windows_are_checked_before_anything_runs(tmp_path: Path) -> None:
    text = PROSE.replace("stride: 4", "strid: 4")
    (problem,) = find_problems(write_suite(tmp_path, text, prose_txt=TEXT))
    assert "tasks.prose.generation.prompt_windows" in problem and "strid" in problem
