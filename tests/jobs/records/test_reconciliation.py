"""Whatever was torn, edited or lost between two runs: the output ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.records import output_records, reconciliation
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.stop_signals import Interrupted
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, edit_line, finish_job, read, write_job

pytestmark = pytest.mark.thorough

COUNT = 12


Damage = Callable[[JobPaths], object]


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def swap(line: int, old: bytes, new: bytes) -> Damage:
    """In one line of the journal."""
    return lambda paths: edit_line(paths.journal, line, lambda data: data.replace(old, new))


def put(line: int, change: Callable[[bytes], bytes]) -> Damage:
    """In the output."""
    return lambda paths: edit_line(paths.out, line, change)


def change_key(line: bytes) -> bytes:
    """Another digit at the start of the key in a record's id."""
    at = line.index(b"batch_req_") + len(b"batch_req_")
    return line[:at] + (b"1" if line[at : at + 1] == b"0" else b"0") + line[at + 1 :]


def reverse(paths: JobPaths) -> None:
    paths.journal.write_bytes(b"".join(reversed(paths.journal.read_bytes().splitlines(keepends=True))))


def remove_folder(paths: JobPaths) -> None:
    for path in paths.folder.iterdir():
        path.unlink()
    paths.folder.rmdir()


# What happens to the files, how many requests the next run makes (None: it depends), and what it says.
DAMAGES: dict[str, tuple[Damage, int | None, str]] = {
    "torn journal": (lambda p: cut(p.journal, 9), 0, "warning: 1 record cannot be verified"),
    "torn output": (
        lambda p: cut(p.out, 9),
        1,
        "the output had 1 line that the last run did not finish writing",
    ),
    "output without its last line end": (
        lambda p: cut(p.out, 1),
        1,
        "the output had 1 line that the last run did not finish writing",
    ),
    "torn errors": (
        lambda p: cut(p.errors, 9),
        None,
        "the output had 1 line that the last run did not finish writing",
    ),
    "no journal": (lambda p: p.journal.unlink(), 0, "warning: 14 records cannot be verified"),
    "empty journal": (lambda p: p.journal.write_bytes(b""), 0, "warning: 14 records cannot be verified"),
    "no output": (
        lambda p: p.out.unlink(),
        COUNT,
        "12 lines will run again because finished records are missing in the output",
    ),
    "no errors": (
        lambda p: p.errors.unlink(),
        1,
        "2 lines will run again because finished records are missing in the output",
    ),
    "no manifest": (lambda p: p.manifest.unlink(), 0, ""),
    "broken manifest": (lambda p: p.manifest.write_text("{"), 0, ""),
    "no run folder": (remove_folder, 0, "warning: 14 records cannot be verified"),
    "journal in another order": (reverse, 0, "journal.jsonl:1: not the head of a journal"),
    "a journal entry twice": (lambda p: edit_line(p.journal, 3, lambda line: line * 2), 0, ""),
    "journal: no JSON": (swap(3, b"{", b"["), 0, "journal.jsonl:4: not JSON"),
    "journal: zeros": (swap(3, b'"', b"\0"), 0, "journal.jsonl:4: not JSON"),
    "journal: other keys": (swap(2, b'"run"', b'"ran"'), 0, "journal.jsonl:3: these are not the keys"),
    "journal: wrong type": (swap(2, b'"run":1', b'"run":"1"'), 0, "journal.jsonl:3: run has the wrong type"),
    "journal: wrong state": (swap(2, b'"done"', b'"won"'), 0, "journal.jsonl:3: state is neither"),
    "journal: wrong check": (
        swap(1, b'"check":"', b'"check":"f'),
        1,
        "1 line will run again because the output was edited",
    ),
    "journal: unknown line": (swap(1, b'"custom_id":"line', b'"custom_id":"else'), 0, ""),
    "an answer edited": (
        put(4, lambda line: line.replace(b"say", b"SAY")),
        1,
        "1 line will run again because the output was edited",
    ),
    "an answer twice": (put(4, lambda line: line * 2), 0, "more than one record of 1 line;"),
    "an answer lost": (
        put(4, lambda _: b""),
        1,
        "1 line will run again because finished records are missing in the output",
    ),
    "an id edited": (
        put(4, lambda line: line.replace(b"batch_req_", b"batch_req_0", 1)),
        1,
        "the output had 1 line that this job did not write or that were damaged",
    ),
    "the key in an id edited": (
        put(4, change_key),
        1,
        "1 line will run again because the output was edited or damaged",
    ),
    "a custom_id edited": (
        put(4, lambda line: line.replace(b'"line-', b'"lime-')),
        1,
        "1 line will run again because finished records are missing in the output",
    ),
    "a foreign line": (
        put(4, lambda line: b"hello\n" + line),
        0,
        "the output had 1 line that this job did not write",
    ),
    "zeros after the output": (
        put(-1, lambda line: line + b"\0" * 50),
        0,
        "the output had 1 line that the last run did not finish writing",
    ),
    "error records among answers": (
        lambda p: p.out.write_bytes(p.out.read_bytes() + p.errors.read_bytes()),
        0,
        "the output had 2 lines that this job did not write",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_damage_is_repaired(tmp_path: Path, name: str) -> None:
    """Each line once, equal to the first run; only what cannot be trusted runs again."""
    bench = await finish_job(tmp_path)
    out, errors = by_id(bench.paths.out), read(bench.paths.errors)
    damage, again, said = DAMAGES[name]
    damage(bench.paths)
    outcome = await bench.run()
    assert outcome.exit_code == 1
    assert by_id(bench.paths.out) == out
    key = lambda record: record["error"]["line"]  # noqa: E731
    assert sorted(read(bench.paths.errors), key=key) == sorted(errors, key=key)
    assert again in (bench.ran, None)
    assert any(said in text for text in [*bench.said, ""])
    assert (outcome.meter.done, outcome.meter.failed) == (COUNT, 2)
    assert sum(group.lines for group in outcome.scores.groups.values()) == COUNT
    await bench.run()
    assert (bench.ran, by_id(bench.paths.out)) == (0, out)
    assert not any("skipped" in text or "run again" in text for text in bench.said)
    assert not any("verified" in text for text in bench.said)


async def test_any_cut_of_any_file(tmp_path: Path) -> None:
    """Output, errors and journal cut anywhere, alone and together: the result is the same."""
    bench = await finish_job(tmp_path)
    out, errors = by_id(bench.paths.out), sorted(bench.paths.errors.read_bytes().splitlines())
    rng = random.Random(5)
    for _ in range(25):
        for path in rng.sample([bench.paths.out, bench.paths.errors, bench.paths.journal], rng.randint(1, 3)):
            data = path.read_bytes()
            path.write_bytes(data[: rng.randint(0, len(data))])
        await bench.run()
        assert by_id(bench.paths.out) == out
        assert sorted(bench.paths.errors.read_bytes().splitlines()) == errors


async def test_moved_lines_keep_their_answers(tmp_path: Path) -> None:
    """Keyed by id and content, not by line number; error records are given the new number."""
    bench = await finish_job(tmp_path)
    write_job(tmp_path, ["", chat("long", "LONG"), *reversed(chats(COUNT))])
    await bench.run()
    assert bench.ran == 0
    assert [(r["custom_id"], r["error"]["line"]) for r in read(bench.paths.errors)] == [("long", 2)]
    assert len(by_id(bench.paths.out)) == COUNT


async def test_a_signal_ends_the_scoring_of_old_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost by it: the next run scores all answers again, and computes none."""
    bench = await finish_job(tmp_path)
    before, add_score, calls = by_id(bench.paths.out), output_records.add_score, list[int]()

    def add_slowly(record: dict[str, Any], line: Any) -> dict[str, Any]:
        calls.append(line.number)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not bench.stop.requested:  # by the event loop, which runs beside this thread
                time.sleep(0.001)
        return add_score(record, line)

    lines = [{**line, "eval": {"expected": "say", "match": "contains"}} for line in chats(COUNT)]
    write_job(tmp_path, [*lines, "bad", chat("long", "LONG")])
    with monkeypatch.context() as patch:
        patch.setattr(output_records, "add_score", add_slowly)
        with pytest.raises(Interrupted):
            await bench.run()
    assert len(calls) < COUNT and by_id(bench.paths.out) == before
    outcome = await bench.run()
    assert bench.ran == 0 and outcome.scores.groups["all"].correct == COUNT


@pytest.mark.parametrize("limit", [1, None])
async def test_a_second_line_with_an_id_is_removed(tmp_path: Path, limit: int | None) -> None:
    """Its error is not that of the first line, which has the same content, finished or not."""
    first, second = chats(2)
    bench = Bench(write_job(tmp_path, [first, second, second]))
    await bench.run()
    assert [record["error"]["code"] for record in read(bench.paths.errors)] == ["invalid_line"]
    if limit is not None:  # as after a kill
        for path in (bench.paths.out, bench.paths.journal):
            found = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(line for line in found if b'line-1"' not in line or b":3," in line))
    write_job(tmp_path, [first, second])
    outcome = await bench.run()
    assert (outcome.done, outcome.failed, bench.ran) == (2, 0, int(limit is not None))
    assert sorted(by_id(bench.paths.out)) == ["line-0", "line-1"] and not read(bench.paths.errors)
    assert not any("cannot be verified" in text or "are missing" in text for text in bench.said)


@pytest.mark.parametrize("kills", [1, 3])
async def test_a_kill_between_two_files_loses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """The output has new scores, and the journal has the digests of before: nothing is taken for edited, and
    whatever was expected meanwhile, the scores are those of the job file."""
    bench = await finish_job(tmp_path)
    before = by_id(bench.paths.out)

    def write(expected: str) -> None:
        lines = [{**line, "eval": {"expected": expected, "match": "contains"}} for line in chats(COUNT)]
        write_job(tmp_path, [*lines, "bad", chat("long", "LONG")])

    for kill in range(kills):
        write("say" if kill % 2 == 0 else "none")
        with monkeypatch.context() as patch:
            patch.setattr(reconciliation, "replace_file", _fail)  # that of the journal
            with pytest.raises(KeyboardInterrupt):
                await bench.run()
        assert by_id(bench.paths.out) != before
    write_job(tmp_path, [*chats(COUNT), "bad", chat("long", "LONG")])
    await bench.run()
    assert bench.ran == 0 and not bench.paths.dropped.exists() and by_id(bench.paths.out) == before
    assert not list(bench.paths.folder.glob("*.tmp*"))
    edit_line(bench.paths.out, 0, lambda data: data.replace(b"say", b"SAY", 1))
    await bench.run()
    assert bench.ran == 1  # the twin: what fits neither journal is edited


def _fail(*_: object) -> None:
    raise KeyboardInterrupt
