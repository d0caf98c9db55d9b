"""Tables in CSV, JSONL and Parquet: their rows, their columns, and files that are none."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.table_files import RowError, read_rows


def read(folder: Path, name: str, content: bytes | str) -> list[tuple[int, Any]]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(path))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path: Path, delimiter: str) -> None:
    """A BOM, quoted line ends and delimiters, CRLF, empty lines; all values are strings."""
    text = '\ufeffa,"b c"\r\n1,"x,""y""\nz"\r\n\r\n,2'.replace(",", delimiter)
    rows = read(tmp_path, "t.csv", text)
    assert rows == [(3, {"a": "1", "b c": f'x{delimiter}"y"\nz'}), (5, {"a": "", "b c": "2"})]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("t.csv", '"a; b; c",d\n1,2\n', {"a; b; c": "1", "d": "2"}),
        ("t.csv", '"a, b, c";d\n1;2\n', {"a, b, c": "1", "d": "2"}),
        ("t.tsv", "a, b, c\td\n1\t2\n", {"a, b, c": "1", "d": "2"}),
        ("t.tsv", "a,b\n1,2\n", {"a": "1", "b": "2"}),
    ],
)
def test_delimiters_in_names_of_columns(
    tmp_path: Path, name: str, content: str, wanted: dict[str, str]
) -> None:
    assert read(tmp_path, name, content) == [(2, wanted)]


def test_csv_rows_of_another_length(tmp_path: Path) -> None:
    """Each row of its own, with the same reason for the same mistake."""
    rows = read(tmp_path, "t.tsv", "a\tb\n1\n1\t2\n3\n1\t2\t3\n")
    assert [(number, str(row)) for number, row in rows if isinstance(row, RowError)] == [
        (2, "the number of cells is 1, that of columns 2"),
        (4, "the number of cells is 1, that of columns 2"),
        (5, "the number of cells is 3, that of columns 2"),
    ]


def test_a_long_cell(tmp_path: Path) -> None:
    assert read(tmp_path, "t.csv", "a\n" + "x" * 300_000) == [(2, {"a": "x" * 300_000})]


def test_jsonl(tmp_path: Path) -> None:
    """Values keep their types; lines that are no object are errors of their own."""
    rows = read(tmp_path, "t.jsonl", '\ufeff{"a": 1, "b": [true, null]}\n\n[1]\n{"a"\n{"c": 2.5}')
    assert [row for row in rows if not isinstance(row[1], RowError)] == [
        (1, {"a": 1, "b": [True, None]}),
        (5, {"c": 2.5}),
    ]
    wrong = [(number, str(row)) for number, row in rows if isinstance(row, RowError)]
    assert wrong == [(3, "not a JSON object"), (4, "not JSON")]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    table = pyarrow.table({"a": [1, 2, None], "b": ["x", "y", "z"], "c": [[1.5], [], None]})
    parquet.write_table(table, path, row_group_size=2)
    assert list(read_rows(path)) == [
        (1, {"a": 1, "b": "x", "c": [1.5]}),
        (2, {"a": 2, "b": "y", "c": []}),
        (3, {"a": None, "b": "z", "c": None}),
    ]
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(JobError, match=r"t.parquet: this is not a Parquet file"):
        list(read_rows(path))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args)

    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JobError, match=r"Parquet files need pyarrow: pip install 'mlxrun\[parquet\]'"):
        read(tmp_path, "t.parquet", b"PAR1")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.xlsx", "a", "a table's name ends in one of .csv, .tsv, .jsonl"),
        ("t.csv", "", "its first line must have the names of the columns"),
        ("t.csv", "a,b,a\n1,2,3\n", "t.csv:1: the column 'a' occurs twice"),
        ("t.csv", 'a\n"x" y\n', "t.csv:2: this is not CSV"),
        ("t.csv", b"a\n\xff\n", "it is not UTF-8 text"),
        ("t.jsonl", b'{"a": "\xff"}\n', "it is not UTF-8 text"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | str, says: str) -> None:
    with pytest.raises(JobError, match=says.replace(".", r"\.")):
        read(tmp_path, name, content)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"none.csv: cannot be read: No such file"):
        list(read_rows(tmp_path / "none.csv"))
