"""Files of lines: filtering, sorting, and the most common reasons of failures."""

from __future__ import annotations

import json
from pathlib import Path

from mlxrun.jobs.records.run_paths import filter_lines, list_common_reasons, sort_lines


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


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    """As that of an output that is on another disk: the file that it names gets the lines."""
    (tmp_path / "big").mkdir()
    real, path, temp = tmp_path / "big/x", tmp_path / "x", tmp_path / "t"
    real.write_bytes(b"b\na\nc\n")
    path.symlink_to(real)
    filter_lines(path, temp, lambda line: None if line == b"c\n" else line)
    assert path.is_symlink() and real.read_bytes() == b"b\na\n"
    sort_lines(path, temp, lambda line: b"ab".index(line[:1]), 2)
    assert path.is_symlink() and real.read_bytes() == b"a\nb\n"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["big", "x", "x"]


def test_common_reasons(tmp_path: Path) -> None:
    path = tmp_path / "x.errors.jsonl"
    reasons = ["too long", "not JSON", "too long", "x" * 900]
    torn = '"x"\n{}\n{"error": {"mess'
    path.write_text("".join(json.dumps({"error": {"message": text}}) + "\n" for text in reasons) + torn)
    assert list_common_reasons(path) == [("too long", 2), ("not JSON", 1), ("x" * 200, 1)]
    assert list_common_reasons(path, read=2) == [("too long", 1), ("not JSON", 1)]
