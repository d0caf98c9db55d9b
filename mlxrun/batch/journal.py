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
from typing import Any, Literal

from mlxrun.errors import JobError

FORMAT = 1
State = Literal["done", "failed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished line. `line` is given for bad lines only, which may have no usable custom_id."""

    run: int
    state: State
    custom_id: str | None
    line: int | None
    key: str
    check: str
    eval: str
    computed: int = 0
    reused: int = 0

    def dump(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, value: Any) -> Entry:
        """ValueError if `value` is not what `dump` writes."""
        if not isinstance(value, dict) or value.keys() != _TYPES.keys():
            raise ValueError("these are not the keys of a journal entry")
        for key, kinds in _TYPES.items():
            if not isinstance(value[key], kinds) or isinstance(value[key], bool):
                raise ValueError(f"{key} has the wrong type")
        if value["state"] not in ("done", "failed"):
            raise ValueError("state is neither done nor failed")
        return cls(**value)


_TYPES: dict[str, tuple[type, ...]] = {
    "run": (int,),
    "state": (str,),
    "custom_id": (str, type(None)),
    "line": (int, type(None)),
    "key": (str,),
    "check": (str,),
    "eval": (str,),
    "computed": (int,),
    "reused": (int,),
}


class Journal:
    """An existing journal, read once. After `entries` is used up, `problems` names what was skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: str | None = None
        self.problems: list[str] = []

    def entries(self) -> Iterator[Entry]:
        """All valid entries in order; later ones of the same line count."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise JobError(f"{self.path}: cannot be read: {error.strerror}; --fresh starts over") from error
        with file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    return  # torn by a kill: never promised
                if number == 1:
                    self.settings = self._header(data)
                elif (entry := self._entry(number, data)) is not None:
                    yield entry

    def _header(self, data: bytes) -> str | None:
        try:
            head = json.loads(data.decode())
            found, settings = head["format"], head["settings"]
        except (ValueError, RecursionError, KeyError, TypeError):
            self.problems.append(f"{self.path}:1: not the head of a journal")
            return None
        if found != FORMAT:
            raise JobError(
                f"{self.path}:1: the journal has format {found!r}, this mlxrun writes {FORMAT}; finish the "
                "job with the version that began it, or start over with --fresh"
            )
        return str(settings)

    def _entry(self, number: int, data: bytes) -> Entry | None:
        try:
            return Entry.parse(json.loads(data.decode()))
        except (ValueError, RecursionError) as error:
            unreadable = isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
            reason = "not JSON" if unreadable else str(error)
            if len(self.problems) < 20:
                self.problems.append(f"{self.path}:{number}: {reason}")
            return None


def header(settings: str) -> bytes:
    """The first line of a journal."""
    return json.dumps({"format": FORMAT, "settings": settings}).encode() + b"\n"
