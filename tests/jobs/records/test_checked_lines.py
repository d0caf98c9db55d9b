"""Lines with a check are read as they were written, or not at all."""

from __future__ import annotations

from mlxrun.jobs.records.checked_lines import dump_checked, parse_checked

VALUE = {"key": "a", "text": 'it says ,"check":"', "at": 3}


def test_lines_are_read_as_they_were_written() -> None:
    lines = [dump_checked(VALUE, b"one"), dump_checked({"key": "b"}, b"one")]
    assert all(line.count(b"\n") == 1 for line in lines)
    assert list(parse_checked(lines, b"one")) == [VALUE, {"key": "b"}]
    assert list(parse_checked(lines, b"two")) == []


def test_a_damaged_line_is_left_out() -> None:
    line, whole = dump_checked(VALUE, b"one"), dump_checked({"key": "b"}, b"one")
    for at in range(len(line)):
        changed = line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]
        for damaged in (changed, line[:at], line[at + 1 :]):
            assert list(parse_checked([damaged, whole], b"one")) == [{"key": "b"}], (at, damaged)
