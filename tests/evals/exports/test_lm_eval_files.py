"""Names and tasks of lm-evaluation-harness's files; test_export_files.py has them read by lm-eval itself."""

from __future__ import annotations

import json
from pathlib import Path

from mlxrun.evals.exports.lm_eval_files import name_tasks, sanitize_model_name, write_lm_eval_files
from tests.helpers.batch_fakes import Bench, chat, write_job
from tests.helpers.export_fakes import open_export


async def test_one_group_is_one_task(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, [chat("a", "x", {"expected": "x", "match": "contains"})]))
    await bench.run()
    run = open_export(bench.job, task="my task")
    results, samples = write_lm_eval_files(run, tmp_path / "out")
    assert results.parent == tmp_path / "out/acme__tiny"
    assert samples.name.startswith("samples_my_task_20") and samples.name.endswith(".jsonl")
    found = json.loads(results.read_text())
    assert found["results"]["my_task"]["contains,none"] == 1 and "groups" not in found
    assert "contains_stderr,none" not in found["results"]["my_task"], "one line has no standard error"
    assert found["higher_is_better"] == {"my_task": {"contains": True}}


async def test_groups_that_differ_in_special_characters_have_names_of_their_own(tmp_path: Path) -> None:
    groups = ("a b", "a_b", "a/b")
    lines = [chat(group, "x", {"expected": "x", "group": group}) for group in groups]
    bench = Bench(write_job(tmp_path, lines))
    await bench.run()
    run = open_export(bench.job)
    tasks = name_tasks(run)
    assert set(tasks) == set(groups) and len(set(tasks.values())) == 3
    _, *samples = write_lm_eval_files(run, tmp_path)
    assert len(samples) == 3 and all(len(path.read_text().splitlines()) == 1 for path in samples)


def test_names_of_models() -> None:
    """As `lm_eval.utils.sanitize_model_name` makes them."""
    assert sanitize_model_name("org/name:v1") == "org__name__v1"
