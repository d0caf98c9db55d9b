"""Whatever was torn, edited or lost between two runs: the output ends as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrun.batch.journal import Journal, JournalEntry, parse_entry
from mlxrun.batch.line_files import filter_lines, sort_lines
from mlxrun.batch.run_paths import JobPaths
from mlxrun.errors import JobError
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, make_config, read, write_job

COUNT = 12
Damage = Callable[[JobPaths], object]


async def finished(folder: Path) -> Bench:
    """A job with good and failed lines, run to its end."""
    bench = Bench(write_job(folder, [*chats(COUNT), "bad", chat("long", "LONG")]))
    assert (await bench.run()).exit_code == 1
    return bench


def edit(path: Path, line: int, change: Callable[[bytes], bytes]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = change(lines[line])
    path.write_bytes(b"".join(lines))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def swap(line: int, old: bytes, new: bytes) -> Damage:
    """In one line of the journal."""
    return lambda paths: edit(paths.journal, line, lambda data: data.replace(old, new))


def put(line: int, change: Callable[[bytes], bytes]) -> Damage:
    """In the output."""
    return lambda paths: edit(paths.out, line, change)


def reverse(paths: JobPaths) -> None:
    paths.journal.write_bytes(b"".join(reversed(paths.journal.read_bytes().splitlines(keepends=True))))


def remove_folder(paths: JobPaths) -> None:
    for path in paths.folder.iterdir():
        path.unlink()
    paths.folder.rmdir()


# What happens to the files, how many requests the next run makes (None: it depends), and what it says.
DAMAGES: dict[str, tuple[Damage, int | None, str]] = {
    "torn journal": (lambda p: cut(p.journal, 9), 0, ""),
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
    "no journal": (lambda p: p.journal.unlink(), 0, ""),
    "empty journal": (lambda p: p.journal.write_bytes(b""), 0, ""),
    "no output": (lambda p: p.out.unlink(), COUNT, ""),
    "no errors": (lambda p: p.errors.unlink(), 1, ""),
    "no manifest": (lambda p: p.manifest.unlink(), 0, ""),
    "broken manifest": (lambda p: p.manifest.write_text("{"), 0, ""),
    "no run folder": (remove_folder, 0, ""),
    "journal in another order": (reverse, 0, "journal.jsonl:1: not the head of a journal"),
    "a journal entry twice": (lambda p: edit(p.journal, 3, lambda line: line * 2), 0, ""),
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
    "an answer lost": (put(4, lambda _: b""), 1, ""),
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
    bench = await finished(tmp_path)
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


async def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    bench = await finished(tmp_path)
    edit(bench.paths.journal, 0, lambda line: line.replace(b'"format":1', b'"format":99'))
    before = bench.paths.out.read_bytes()
    with pytest.raises(
        JobError, match=r"journal.jsonl:1: the journal has format 99, this mlxrun writes 1.*--fresh"
    ):
        await bench.run()
    assert bench.paths.out.read_bytes() == before
    assert (await bench.run(fresh=True)).exit_code == 1


async def test_a_journal_with_other_spaces_is_the_same(tmp_path: Path) -> None:
    """Earlier versions wrote some after each colon and comma."""
    bench = await finished(tmp_path)
    values = [json.loads(line) for line in bench.paths.journal.read_bytes().splitlines()]
    bench.paths.journal.write_text("".join(json.dumps(value) + "\n" for value in values))
    edit(bench.paths.out, 4, lambda line: line.replace(b"say", b"SAY"))
    await bench.run()
    assert bench.ran == 1
    assert bench.said[0].startswith("1 line will run again because the output was edited")


async def test_any_cut_of_any_file(tmp_path: Path) -> None:
    """Output, errors and journal cut anywhere, alone and together: the result is the same."""
    bench = await finished(tmp_path)
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
    bench = await finished(tmp_path)
    write_job(tmp_path, ["", chat("long", "LONG"), *reversed(chats(COUNT))])
    await bench.run()
    assert bench.ran == 0
    assert [(r["custom_id"], r["error"]["line"]) for r in read(bench.paths.errors)] == [("long", 2)]
    assert len(by_id(bench.paths.out)) == COUNT


async def test_a_killed_run_is_in_the_manifest(tmp_path: Path) -> None:
    """What a run did that had no time to say so is added up from its journal entries."""
    bench = await finished(tmp_path)
    manifest = json.loads(bench.paths.manifest.read_text())
    whole = dict(manifest["runs"][0])
    manifest["runs"][0].update(ended=None, exit=None, computed=0, reused=0, done=0, failed=0)
    bench.paths.manifest.write_text(json.dumps(manifest))
    await bench.run()
    runs = json.loads(bench.paths.manifest.read_text())["runs"]
    assert runs[0] == {**whole, "ended": None, "exit": None}
    assert (runs[1]["exit"], runs[1]["computed"]) == (1, 0)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux for the names of open files")
async def test_the_journal_never_runs_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each journal entry is written after its record, and the record was synced in between."""
    import os

    bench = Bench(write_job(tmp_path, chats(COUNT)), make_config(rows=2))
    real, synced = os.fsync, dict[str, int]()
    checked = []

    def fsync(handle: int) -> None:
        real(handle)
        name = os.readlink(f"/proc/self/fd/{handle}")
        synced[name] = os.fstat(handle).st_size
        if name == str(bench.paths.journal):
            claimed = sum(1 for _ in Journal(bench.paths.journal).read_entries())
            safe = bench.paths.out.read_bytes()[: synced[str(bench.paths.out)]].count(b"\n")
            checked.append(claimed <= safe)

    monkeypatch.setattr("mlxrun.batch.line_runner.COMMIT_LINES", 2)
    monkeypatch.setattr("os.fsync", fsync)
    bench.client.pause = 0.001
    await bench.run()
    assert len(checked) > 1 and all(checked)


def test_entries_survive_a_round_trip() -> None:
    entry = JournalEntry(3, "failed", None, 7, "k", "c", "e", 1, 2)
    assert parse_entry(entry.dump()) == entry


def test_rewriting_lines(tmp_path: Path) -> None:
    path, temp = tmp_path / "x", tmp_path / "t"
    path.write_bytes(b"a\nb\nc\nd")
    before = path.stat().st_ino
    filter_lines(path, temp, lambda line: line)
    assert path.stat().st_ino == before
    filter_lines(path, temp, lambda line: line if line.endswith(b"\n") else None)
    assert (path.read_bytes(), path.stat().st_ino) == (b"a\nb\nc\n", before)
    filter_lines(path, temp, lambda line: {b"a\n": line, b"b\n": None}.get(line, b"C\n"))
    assert path.read_bytes() == b"a\nC\n"
    sort_lines(path, temp, lambda line: b"CaX".index(line[:1]), 3)
    assert path.read_bytes() == b"C\na\n"
    before = path.stat().st_ino
    sort_lines(path, temp, lambda line: b"CaX".index(line[:1]), 3)
    assert path.stat().st_ino == before
    assert not temp.exists()
