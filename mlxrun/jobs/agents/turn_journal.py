"""turns.jsonl: the steps of unfinished conversations, with which a killed job continues inside them.

    {"key": K, "at": 2, "step": {"kind": "tool", "content": "sunny", "state": {}, "seconds": 0.1}, "check": C}

A step is an answer of the model or of the simulated user, or the result of one call. It is written before
the next one begins. A conversation that goes on takes its steps from here in the same order, and so comes to
where it was. `at` counts the steps of a line; 0 begins anew. Damaged steps, and those behind them, are taken
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.core.durable_writes import write_atomically
from mlxrun.jobs.lines.line_index import LineIndex
from mlxrun.jobs.records.checked_lines import dump_checked, parse_checked
from mlxrun.jobs.records.run_paths import Appender, wrap_write_errors

Json = dict[str, Any]
_FORMAT = b"mlxrun turns 1"


@dataclass(slots=True)
class LineSteps:
    """The steps of one line, which its conversation takes one after the other."""

    key: str
    file: Appender
    steps: list[Json] = field(default_factory=list)
    position: int = 0

    def take(self, kind: str) -> Json | None:
        """Take the next step if it is known and of this kind. Others that are known do not fit any more."""
        if self.position < len(self.steps) and self.steps[self.position]["kind"] == kind:
            self.position += 1
            return self.steps[self.position - 1]
        del self.steps[self.position :]
        return None

    def add(self, step: Json) -> None:
        """Add a step that was just taken. JobError if it cannot be written."""
        self.file.append(_dump_step(self.key, len(self.steps), step))
        self.steps.append(step)
        self.position = len(self.steps)

    def restart(self) -> None:
        """Forget all steps."""
        self.steps, self.position = [], 0


class TurnJournal:
    """The steps of the running conversations of one job, and their file."""

    def __init__(self, path: Path) -> None:
        self._file = Appender(path)
        self._lines: dict[str, LineSteps] = {}

    def __len__(self) -> int:
        """The number of conversations with steps."""
        return len(self._lines)

    def read(self, index: LineIndex) -> None:
        """Read the steps of unfinished lines, and remove all others from the file. JobError if it cannot be
        read or written."""
        if not self._file.path.exists():
            return
        todo = set(index.list_todo_keys())
        with wrap_write_errors(self._file.path):
            with self._file.path.open("rb") as file:
                found = {key: steps for key, steps in _parse_steps(file).items() if key in todo}
            data = b"".join(
                _dump_step(key, at, step) for key, steps in found.items() for at, step in enumerate(steps)
            )
            write_atomically(self._file.path, data, durable=False)
        self._lines = {key: LineSteps(key, self._file, steps) for key, steps in found.items()}

    def open_line(self, key: str) -> LineSteps:
        """Return the steps of a line from the first on."""
        found = self._lines.setdefault(key, LineSteps(key, self._file))
        found.position = 0
        return found

    def remove_line(self, key: str) -> None:
        """Forget the steps of a line in memory. The file has them until its record is written."""
        self._lines.pop(key, None)

    def close(self) -> None:
        self._file.close()

    def delete_file(self) -> None:
        """Delete the file of a complete job."""
        self._file.delete()


def _dump_step(key: str, at: int, step: Json) -> bytes:
    return dump_checked({"key": key, "at": at, "step": step}, _FORMAT)


def _parse_steps(lines: Iterable[bytes]) -> dict[str, list[Json]]:
    """The steps of each line by its key, up to the first that is damaged."""
    found: dict[str, list[Json]] = {}
    for value in parse_checked(lines, _FORMAT):
        steps = found.setdefault(value["key"], [])
        if value["at"] <= len(steps):
            steps[value["at"] :] = [value["step"]]
    return found
