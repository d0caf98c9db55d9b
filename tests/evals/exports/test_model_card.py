"""Scores for the hub, read by huggingface_hub's own functions."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from huggingface_hub.repocard_data import model_index_to_eval_results

from mlxrun.core import durable_writes
from mlxrun.core.errors import JobError
from mlxrun.evals.exports.model_card import build_entry, build_model_index, write_model_card
from tests.helpers.export_fakes import SCORED, finish_rich_job, open_export


async def test_a_readme_has_the_scores(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path, dataset="acme/sums@abc")
    path = tmp_path / "README.md"
    write_model_card([run], path)
    card = ModelCard.load(path)
    assert card.data.model_name == "acme/tiny"
    results = {result.metric_name: result for result in card.data.eval_results}
    total = results["score"]
    assert (total.task_type, total.task_name) == ("text-generation", "job")
    assert (total.dataset_type, total.dataset_revision) == ("acme/sums", "abc")
    assert total.metric_value == pytest.approx(run.summary.total.scores.value, abs=1e-4)
    interval = run.summary.total.interval
    assert interval is not None
    assert total.metric_args["confidence_interval"] == [round(interval.low, 4), round(interval.high, 4)]
    assert (total.metric_args["lines"], total.metric_args["failed"]) == (len(SCORED), 1)
    assert {"acc (pick)", "score (a)", "pass@2"} <= set(results)


async def test_several_runs_of_one_model(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    other = open_export(run.run.paths.job, task="again")
    write_model_card([run, other], tmp_path / "card.md")
    found = yaml.safe_load((tmp_path / "card.md").read_text().strip("-\n"))
    name, results = model_index_to_eval_results(found["model-index"])
    assert name == "acme/tiny" and {result.task_name for result in results} == {"job", "again"}
    with pytest.raises(JobError, match="these runs are of acme/tiny, other/model"):
        write_model_card([run, open_export(run.run.paths.job, model="other/model")], tmp_path / "x.md")
    assert not (tmp_path / "x.md").exists()


async def test_an_entry_of_the_newer_format(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path, dataset="acme/sums@abc", task="hard")
    path = tmp_path / "sums.yaml"
    write_model_card([run], path)
    (entry,) = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert (entry.dataset_id, entry.dataset_revision, entry.task_id) == ("acme/sums", "abc", "hard")
    assert entry.value == pytest.approx(run.summary.total.scores.value, abs=1e-4)
    assert entry.date == run.ended and entry.notes is not None
    assert entry.notes.startswith(f"{len(SCORED)} lines; 95% interval ") and "; 1 failed" in entry.notes


async def test_the_newer_format_needs_a_benchmark_of_the_hub(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    with pytest.raises(JobError, match="--dataset OWNER/NAME"):
        write_model_card([run], tmp_path / "sums.yaml")
    with pytest.raises(JobError, match=r"ends in \.md, \.yaml, \.yml"):
        write_model_card([run], tmp_path / "sums")


async def test_answers_that_could_not_be_scored_are_named(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path, dataset="acme/sums")
    run.summary.total.unscored = 2
    assert "; 2 unscored" in build_entry(run)["notes"]
    found = build_model_index([run])["model-index"][0]["results"][0]["metrics"][0]
    assert found["args"]["unscored"] == 2


CARD = """---
license: mit  # ours
tags: [a, b]
model-index:
- name: old
  results:
  - task: {type: text-generation}

    dataset: {type: old, name: old}
    metrics: [{type: acc, value: 0.1}]
language: [en]
---

# A model

---
Its text.
"""


async def test_a_readme_keeps_its_text_and_metadata(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    path = tmp_path / "README.md"
    for text in (CARD, CARD.replace("\n", "\r\n")):
        path.write_bytes(text.encode())
        for _ in range(2):
            write_model_card([run], path)
        data = path.read_bytes().decode()
        assert data.startswith(text.partition("model-index:")[0])
        assert data.endswith(text[text.index("---", 4) :])
        card = ModelCard.load(path)
        assert (card.data.license, card.data.tags, card.data.language) == ("mit", ["a", "b"], ["en"])
        assert card.data.model_name == "acme/tiny"
        assert {result.task_name for result in card.data.eval_results} == {"job"}
    path.write_text("# Text alone\n")
    write_model_card([run], path)
    assert path.read_text().endswith("---\n# Text alone\n") and ModelCard.load(path).data.eval_results


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"---\na: [\n---\n", "not YAML: expected the node content, but found '<stream end>'; give"),
        (b"---\ntext\n---\n", "its front matter is no mapping"),
        (b"---\n{model-index: [], license: mit}\n---\n", "is not YAML|cannot be replaced where it is"),
        (b"\xff", "is not UTF-8"),
    ],
)
async def test_a_readme_that_cannot_be_read_stays(tmp_path: Path, text: bytes, says: str) -> None:
    run = await finish_rich_job(tmp_path)
    path = tmp_path / "README.md"
    path.write_bytes(text)
    with pytest.raises(JobError, match=says):
        write_model_card([run], path)
    assert path.read_bytes() == text


async def test_a_full_disk_leaves_a_readme_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await finish_rich_job(tmp_path)
    path = tmp_path / "README.md"
    path.write_text(CARD)
    monkeypatch.setattr(durable_writes, "sync_file", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_model_card([run], path)
    assert path.read_text() == CARD and not list(tmp_path.glob("README.md.*"))
