"""Lines are paired by id; what is not the same line is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.comparison import ANY_SAME_LINE
from mlxrun.evals.comparisons.pairing import PairedLines, PairingRules
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.batch_fakes import chat, edit_line
from tests.helpers.eval_runs import HAS_X, run_lines, sampled_chats


def pair(first: Path, second: Path, rules: PairingRules = ANY_SAME_LINE) -> PairedLines:
    found = PairedLines()
    found.add_runs(RunFolder.open(first), RunFolder.open(second), rules)
    return found


async def test_lines_are_paired_by_id_in_any_order(tmp_path: Path) -> None:
    lines = sampled_chats(9)
    first = await run_lines(tmp_path / "a", lines)
    second = await run_lines(tmp_path / "b", lines[::-1])
    found = pair(first, second).lines
    assert list(found) == [f"q{at}" for at in range(8, -1, -1)]
    assert all(line.first == line.second and line.epochs == 1 for line in found.values())


async def test_other_lines_are_refused_with_their_ids(tmp_path: Path) -> None:
    lines = sampled_chats(20)
    first = await run_lines(tmp_path / "a", lines)
    changed = [
        *lines[2:10],
        chat("q10", "another", HAS_X | {"group": "g0"}),
        chat("q11", "say 11", {"expected": "y", "match": "contains", "group": "g1"}),
        chat("q12", "say 12", {"expected": "x", "match": "exact", "group": "g0"}),
        *lines[13:],
        *[chat(f"new{at}", "hello", HAS_X) for at in range(7)],
    ]
    second = await run_lines(tmp_path / "b", changed)
    message = (
        "A and B are not runs of the same lines: 2 lines only in A ('q0', 'q1'); 7 lines only in B ('new0', "
        "'new1', 'new2', 'new3', 'new4', ...); 1 line with another prompt ('q10'); 2 lines with another "
        "expected answer or scorer ('q11', 'q12'); --common compares the 15 lines that are the same"
    )
    with pytest.raises(JobError) as error:
        pair(first, second)
    text = str(error.value).replace(str(tmp_path / "a" / "job.out.jsonl"), "A")
    assert text.replace(str(tmp_path / "b" / "job.out.jsonl"), "B") == message
    found = pair(first, second, PairingRules(common=True))
    assert list(found.lines) == [*(f"q{at}" for at in range(2, 10)), *(f"q{at}" for at in range(13, 20))]
    assert (found.mismatches.only_first, found.mismatches.prompts) == (["q0", "q1"], ["q10"])
    assert "q10" in pair(first, second, PairingRules(common=True, any_prompt=True)).lines


async def test_options_of_scoring_are_part_of_the_line(tmp_path: Path) -> None:
    wanted = {"expected": 3, "match": "number"}
    first = await run_lines(tmp_path / "a", [chat("a", "say 3", wanted)])
    second = await run_lines(tmp_path / "b", [chat("a", "say 3", wanted | {"tolerance": 0.5})])
    with pytest.raises(JobError, match=r"1 line with another expected answer or scorer \('a'\)"):
        pair(first, second)


async def test_an_unfinished_run_is_named(tmp_path: Path) -> None:
    lines = sampled_chats(6)
    first = await run_lines(tmp_path / "a", lines)
    second = await run_lines(tmp_path / "b", lines, limit=4)
    with pytest.raises(
        JobError,
        match=r"2 lines only in .*a/job.out.jsonl \('q4', 'q5'\) \(.*b/job.out.jsonl is unfinished\)",
    ):
        pair(first, second)
    with pytest.raises(JobError, match="no line is the same"):
        pair(first, await run_lines(tmp_path / "c", [chat("z", "hello")]))


async def test_settings_of_bodies_may_differ_and_are_counted(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", sampled_chats(3, temperature=0.5))
    second = await run_lines(tmp_path / "b", sampled_chats(3, temperature=1, top_p=0.9))
    found = pair(first, second)
    assert found.settings == {"temperature": 3, "top_p": 3}
    assert found.examples == {"temperature": (0.5, 1), "top_p": (None, 0.9)}


async def test_images_are_part_of_the_prompt(tmp_path: Path) -> None:
    """Two job files in folders of their own, with the same path and other bytes."""
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    line = chat("a", "x", HAS_X)
    line["body"]["messages"][0]["content"] = [{"type": "text", "text": "x"}, image]
    for name, data in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(data)
    jobs = [await run_lines(tmp_path / name, [line]) for name in "abc"]
    assert list(pair(jobs[0], jobs[1]).lines) == ["a"]
    with pytest.raises(JobError, match="1 line with another prompt"):
        pair(jobs[0], jobs[2])


async def test_prompts_of_a_changed_job_are_not_compared(tmp_path: Path) -> None:
    lines = sampled_chats(4)
    first, second = [await run_lines(tmp_path / name, lines) for name in "ab"]
    edit_line(second, 1, lambda line: line.replace(b"say 1", b"ask 1"))
    found = pair(first, second)
    assert (found.unknown, len(found.lines)) == (1, 4)


async def test_edited_runs_are_not_compared(tmp_path: Path) -> None:
    jobs = [await run_lines(tmp_path / name, sampled_chats(4)) for name in "ab"]
    edit_line(tmp_path / "b" / "job.out.jsonl", 2, lambda line: line.replace(b'"score": ', b'"score":  '))
    with pytest.raises(JobError, match=r"b/job.out.jsonl:3: line 'q\d' was edited or damaged"):
        pair(jobs[0], jobs[1])


async def test_another_score_of_the_records_may_be_compared(tmp_path: Path) -> None:
    lines = [chat("a", "axe", HAS_X | {"metrics": ["majority", "pass@1"]}, n=3)]
    job = await run_lines(tmp_path, lines)
    run = RunFolder.open(job)
    found = PairedLines()
    found.add_runs(run, run, PairingRules(metric="pass@1"))
    assert found.lines["a"].first == 1
    with pytest.raises(JobError, match=r"line 'a': has no score 'acc' \(its `scores`: majority, pass@1\)"):
        PairedLines().add_runs(run, run, PairingRules(metric="acc"))


async def test_a_line_that_could_not_be_scored_has_0_in_every_score(tmp_path: Path) -> None:
    """As in tables and reports; a score that lines lack is named with its run."""
    lines = [
        chat("a", "axe", HAS_X | {"metrics": ["mean"]}, n=2),
        chat("b", "b", {"match": "judge", "expected": "axe"}),
    ]
    run = RunFolder.open(await run_lines(tmp_path, lines))
    found = PairedLines()
    found.add_runs(run, run, PairingRules(metric="mean"))
    assert (found.lines["a"].first, found.lines["b"].first, found.lines["b"].unscored) == (1, 0, 1)
    with pytest.raises(JobError, match=r"job.out.jsonl: line 'a': has no score 'acc'"):
        PairedLines().add_runs(run, run, PairingRules(metric="acc"))


async def test_clusters_come_from_ids_groups_or_records(tmp_path: Path) -> None:
    lines = [chat(f"q{at // 2}-e{at % 2}", "x", HAS_X | {"group": f"g{at % 3}"}) for at in range(6)]
    run = RunFolder.open(await run_lines(tmp_path, lines))

    def list_clusters(cluster: str | re.Pattern[str] | None) -> list[str | None]:
        found = PairedLines()
        found.add_runs(run, run, PairingRules(cluster=cluster))
        return [line.cluster for line in found.lines.values()]

    assert list_clusters(None) == [None] * 6
    assert list_clusters("group") == ["g0", "g1", "g2", "g0", "g1", "g2"]
    assert list_clusters(re.compile(r"(.+)-e\d")) == ["q0", "q0", "q1", "q1", "q2", "q2"]
    assert list_clusters(re.compile(r"q[01]")) == ["q0", "q0", "q1", "q1", None, None]
    assert list_clusters(re.compile(r"z*")) == [None] * 6
    assert list_clusters(re.compile(r"q(0?)")) == ["0", "0", None, None, None, None]


async def test_a_job_of_many_lines_keeps_no_texts(tmp_path: Path) -> None:
    job = await run_lines(tmp_path, [chat("a", "x" * 5000, HAS_X)])
    found = pair(job, job)
    assert "xxxx" not in json.dumps([str(line) for line in found.lines.values()])
