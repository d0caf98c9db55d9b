"""The journal: its entries, its format, and journals of other versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.records.journal import JournalEntry, dump_entry, parse_entry
from tests.helpers.batch_fakes import edit_line, finish_job


async def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    edit_line(bench.paths.journal, 0, lambda line: line.replace(b'"format":1', b'"format":99'))
    before = bench.paths.out.read_bytes()
    with pytest.raises(
        JobError, match=r"journal.jsonl:1: the journal has format 99, this mlxrun writes 1.*--fresh"
    ):
        await bench.run()
    assert bench.paths.out.read_bytes() == before
    assert (await bench.run(fresh=True)).exit_code == 1


async def test_a_journal_with_other_spaces_is_the_same(tmp_path: Path) -> None:
    """Earlier versions wrote some after each colon and comma."""
    bench = await finish_job(tmp_path)
    values = [json.loads(line) for line in bench.paths.journal.read_bytes().splitlines()]
    bench.paths.journal.write_text("".join(json.dumps(value) + "\n" for value in values))
    edit_line(bench.paths.out, 4, lambda line: line.replace(b"say", b"SAY"))
    await bench.run()
    assert bench.ran == 1
    assert bench.said[0].startswith("1 line will run again because the output was edited")


def test_entries_survive_a_round_trip() -> None:
    entry = JournalEntry(3, "failed", None, 7, "k", "c", "e", 1, 2)
    assert parse_entry(dump_entry(entry)) == entry
