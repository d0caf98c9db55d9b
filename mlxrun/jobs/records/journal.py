"""journal.jsonl: the finished lines, each written right after its record.

The first line has the format and the settings digest; each further line is an entry for one finished line.
`check` is a digest of the record's bytes, so an edited or damaged record is detected. A broken entry is
skipped and reported (its record is checked by itself); another format is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from mlxrun.core.errors import JobError

FORMAT = 1
MOST_PROBLEMS = 20
_TYPES = (int, str, str | None, int | None, str, str, str, int, int)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One finished line. `line` is its number, for bad lines, which may have no usable custom_id."""

    run: int
    state: str  # done or failed
    custom_id: str | None
    line: int | None
    key: str
    check: str
    eval: str
    computed: int = 0
    reused: int = 0

    def dump(self) -> bytes:
        """The entry as a line of the journal."""
        # asdict takes ten times as long.
        return dump_line({name: getattr(self, name) for name in self.__slots__})


class Journal:
    """An existing journal. After `read_entries` has ended, `problems` names the entries that were skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: str | None = None
        self.problems: list[str] = []

    def read_entries(self) -> Iterator[JournalEntry]:
        """All valid entries in order; a later one of the same line replaces an earlier one."""
        if not self.path.exists():
            return
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise JobError(f"{self.path}: cannot be read: {error.strerror}; --fresh starts over") from error
        with file:
            for number, data in enumerate(file, 1):
                try:
                    if not data.endswith(b"\n"):
                        return  # a kill interrupted its writing
                    if number == 1:
                        self.settings = self._parse_head(data)
                    else:
                        yield parse_entry(data)
                except ValueError as error:
                    if len(self.problems) < MOST_PROBLEMS:
                        self.problems.append(f"{self.path}:{number}: {error}")

    def _parse_head(self, data: bytes) -> str:
        head = _parse_json(data)
        if not isinstance(head, dict) or not head.keys() >= {"format", "settings"}:
            raise ValueError("not the head of a journal")
        if head["format"] != FORMAT:
            raise JobError(
                f"{self.path}:1: the journal has format {head['format']!r}, this mlxrun writes {FORMAT}; "
                "finish the job with the version that began it, or start over with --fresh"
            )
        return str(head["settings"])


def dump_line(value: dict[str, Any]) -> bytes:
    """The first line of a journal, or an entry, as JSON."""
    try:
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def parse_entry(data: bytes) -> JournalEntry:
    """ValueError if `data` is not what `dump` writes."""
    value = _parse_json(data)
    names = JournalEntry.__slots__
    if not isinstance(value, dict) or tuple(value) != names:
        raise ValueError("these are not the keys of a journal entry")
    for name, kind in zip(names, _TYPES, strict=True):
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise ValueError(f"{name} has the wrong type")
    if value["state"] not in ("done", "failed"):
        raise ValueError("state is neither done nor failed")
    return JournalEntry(**value)


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
