"""The index of a job file: every line once, found by its id, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.jobs.lines.job_file import BadLine, JobLine
from mlxrun.jobs.lines.line_index import DONE, LineIndex
from mlxrun.jobs.lines.line_keys import LineKeys
from mlxrun.jobs.records.reconciliation import Reconciler
from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.batch_fakes import chat

pytestmark = pytest.mark.thorough

GOOD = chat("a", "hi", max_tokens=3)


def index_of(path: Path, data: bytes) -> LineIndex:
    path.write_bytes(data)
    index = LineIndex(path, LineKeys("settings", path.parent, 10**6))
    index.scan()
    return index


def entries(index: LineIndex) -> Iterator[JobLine | BadLine]:
    yield from (index.load(position).line for position in range(len(index)))
    index.close()


def test_the_file(tmp_path: Path) -> None:
    """BOM, CRLF, empty lines, no end of line at the end; numbers count every line."""
    good = json.dumps(GOOD).encode()
    second = good.replace(b'"a"', b'"b"')
    data = b"\xef\xbb\xbf" + good + b"\r\n\r\n  \n" + second + b"\n\n" + b"\xef\xbb\xbf" + good + b"\n" + good
    index = index_of(tmp_path / "x.jsonl", data)
    assert index.sha256 == hashlib.sha256(data).hexdigest()
    lines = list(entries(index))
    assert [line.number for line in lines] == [1, 4, 6, 7]
    assert [type(line) for line in lines] == [JobLine, JobLine, BadLine, BadLine]
    assert isinstance(lines[3], BadLine)
    assert lines[3].reason == "custom_id 'a' is already used by line 1"


def test_a_repeated_id_has_the_key_of_its_line(tmp_path: Path) -> None:
    """A short line has no custom_id, even if another line has."""
    short = {"id": "a", "prompt": "x"}
    data = "\n".join(map(json.dumps, (GOOD, short, {**short, "id": "b"}, {**GOOD, "custom_id": "b"})))
    lines = list(entries(index_of(tmp_path / "x.jsonl", data.encode())))
    bad = [(line.reason, line.param, line.spoils_file) for line in lines if isinstance(line, BadLine)]
    assert bad == [
        ("id 'a' is already used by line 1", "id", True),
        ("custom_id 'b' is already used by line 3", "custom_id", True),
    ]


def test_a_line_of_no_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.jobs.lines.job_file.MAX_LINE", 1000)
    good = json.dumps(GOOD).encode()
    index = index_of(tmp_path / "x.jsonl", b"x" * 4500 + b"\n" + good + b"\n" + b"y" * 999)
    lines = list(entries(index))
    assert [line.number for line in lines] == [1, 2, 3]
    assert isinstance(lines[0], BadLine)
    assert lines[0].reason.startswith("longer than")
    assert isinstance(lines[1], JobLine)


def test_many_lines_in_little_memory(tmp_path: Path) -> None:
    """4,000 lines of 1 kB cost less than 100 bytes each, and each is found again."""
    count = 4_000
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"id": f"line {i}", "prompt": "x" * 1000}) + "\n")
    tracemalloc.start()
    index = LineIndex(path, LineKeys("s", tmp_path, 0))
    index.scan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index) == count
    assert peak < 100 * count
    for position in (0, 1023, 2_321, count - 1):
        assert index.find(f"line {position}") == position
        assert index.load(position).line.custom_id == f"line {position}"
    assert index.find("line x") is None
    index.close()


@given(st.lists(st.binary(max_size=12).filter(lambda data: b"\n" not in data), max_size=12))
def test_any_file_is_read_line_by_line(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    """Every line that is not empty is there once, under its own number, also when read again."""
    path = tmp_path_factory.mktemp("any") / "x.jsonl"
    stripped = [data.removeprefix(b"\xef\xbb\xbf") if not at else data for at, data in enumerate(lines)]
    wanted = [at for at, data in enumerate(stripped, 1) if data.strip(b" \t\r")]
    if not wanted:
        return
    assert [line.number for line in entries(index_of(path, b"\n".join(lines)))] == wanted


def test_what_a_rerun_needs_of_each_line_is_bounded_too(tmp_path: Path) -> None:
    """With the journal's digests of 4,000 finished answers, still less than 100 bytes a line."""
    count = 4_000
    path = tmp_path / "big.jsonl"
    path.write_text("".join(json.dumps({"id": f"line {i}", "prompt": "x"}) + "\n" for i in range(count)))
    paths = JobPaths(path)
    paths.folder.mkdir()
    index = LineIndex(path, LineKeys("s", tmp_path, 0))
    index.scan()
    with paths.journal.open("w") as file:
        file.write('{"format":1,"settings":"s"}\n')
        for at in range(count):
            row = index.get_row(at)
            entry = {"run": 1, "state": "done", "custom_id": f"line {at}", "line": None, "key": row.key.hex()}
            entry |= {"check": "0" * 16, "eval": row.eval.hex(), "computed": 1, "reused": 0}
            file.write(json.dumps(entry) + "\n")
    index.close()
    tracemalloc.start()
    index = LineIndex(path, LineKeys("s", tmp_path, 0))
    index.scan()
    state = Reconciler(index, paths).read_journal()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    index.close()
    assert state.runs[1].done == count
    assert peak < 100 * count


def test_lines_of_a_group_come_together(tmp_path: Path) -> None:
    """In their order. Done ones are left out, and a prefix is the same only within a group."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(chat(f"{n}", "hello", model="ba"[n % 2])) + "\n" for n in range(6)))
    index = LineIndex(path, LineKeys("", None, 0), find_group=lambda line: ord(line.body["model"]))
    index.scan()
    index.state[2] = DONE
    assert list(index.iterate_todo(5)) == [1, 3, 0, 4]
    rows = [index.get_row(position) for position in range(6)]
    assert len({row.prefix_hash for row in rows}) == 1 and len({row.grouped_prefix for row in rows}) == 2
    index.close()
