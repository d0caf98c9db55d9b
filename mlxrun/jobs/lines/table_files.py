"""Reads the rows of a table: a CSV, JSONL or Parquet file, one row at a time. A text file is one row.

The first line of a CSV file has the column names; commas, semicolons or tabs separate cells, and values are
strings. Values of JSONL and Parquet keep their types.
"""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.core.limited_json import NestedTooDeeply, load_json
from mlxrun.core.text_files import check_encoding, open_regular

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".txt")
_DELIMITERS = ",;\t"
_QUOTED = re.compile(r'"[^"]*(?:"|$)')
Row = dict[str, Any]


class RowError(Exception):
    """A row cannot be used. The text is equal for rows that are wrong in the same way."""


def read_rows(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the rows of a table with their numbers. In CSV and JSONL, a row's number is that of the line
    where it ends. JobError if the file cannot be read at all."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise JobError(f"{path}: a table's name ends in one of {', '.join(SUFFIXES)}")
    readers = {".parquet": _read_parquet, ".csv": _read_csv, ".tsv": _read_csv, ".txt": _read_text}
    read = readers.get(suffix, _read_jsonl)
    try:
        with open_regular(path) as file:
            check_encoding(file.read(4))
        yield from read(path)
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: it is not UTF-8 text: {error.reason}; save it as UTF-8") from error


def _guess_delimiter(path: Path, first: str) -> str:
    """The delimiter of which the first line has most outside quotes; in a .tsv file a tab, if it has one."""
    plain = _QUOTED.sub("", first)
    if path.suffix.lower() == ".tsv" and "\t" in plain:
        return "\t"
    return max(_DELIMITERS, key=plain.count)


def _read_csv(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        rows = csv.reader(file, delimiter=_guess_delimiter(path, first), strict=True)
        try:
            columns = next(rows, [])
            _check_columns(path, columns)
            for cells in rows:
                if len(cells) == len(columns):
                    yield rows.line_num, dict(zip(columns, cells, strict=True))
                elif cells:
                    yield (
                        rows.line_num,
                        RowError(f"the number of cells is {len(cells)}, that of columns {len(columns)}"),
                    )
        except csv.Error as error:
            raise JobError(f"{path}:{rows.line_num}: this is not CSV: {error}") from error


def _read_text(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield 1, {"text": file.read()}


def _check_columns(path: Path, columns: list[str]) -> None:
    if not columns:
        raise JobError(f"{path}: the file is empty; its first line must have the names of the columns")
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise JobError(f"{path}:1: the column {twice!r} occurs twice")


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = load_json(line)
            except NestedTooDeeply as error:
                yield number, RowError(str(error))
            except ValueError:
                yield number, RowError("not JSON")
            else:
                yield number, row if isinstance(row, dict) else RowError("not a JSON object")


def _read_parquet(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise JobError(f"{path}: Parquet files need pyarrow: pip install 'mlxrun[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches())
            yield from enumerate((row for batch in batches for row in batch), 1)
    except arrow.ArrowException as error:
        raise JobError(f"{path}: this is not a Parquet file that can be read: {error}") from error
