"""journal.jsonl: which lines are finished, written only after their record is safe on disk.

First line: format and settings digest. Then one entry a finished line. The records are the truth, the
journal vouches for them: `check` is a digest of the record's bytes, so an edited record is noticed. A torn
or broken entry is skipped and named (its record is checked by itself); another format is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxrun.errors import JobError

FORMAT = 1
MOST_PROBLEMS = 20
_TYPES = (int, str, str | None, int | None, str, str, str, int, int)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One finished line. `line` is given for bad lines only, which may have no usable custom_id."""

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
        return dump_line(asdict(self))


class Journal:
    """An existing journal, read once. After `entries` is used up, `problems` names what was skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: str | None = None
        self.problems: list[str] = []

    def entries(self) -> Iterator[JournalEntry]:
        """All valid entries in order; later ones of the same line count."""
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
                        return  # torn by a kill: never promised
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
    """The head of a journal, or an entry."""
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
