"""A finished line of a run, with what reports and comparisons read of its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.jobs.lines.job_file import BadLine, JobLine
from mlxrun.jobs.scoring.answer_text import extract_answer


@dataclass(frozen=True, slots=True)
class RunLine:
    """A finished line of a run. `id`: its custom_id, or `line 7` for a line that has none of its own;
    `number`: in the job file, None if that has changed; `line`: the job's line, None if it has changed."""

    id: str
    number: int | None
    line: JobLine | BadLine | None
    record: dict[str, Any]

    @property
    def answer(self) -> str | None:
        """The text that is scored; None for a failed line."""
        return None if self.record["error"] is not None else extract_answer(self.record["response"]["body"])

    @property
    def reasoning(self) -> str | None:
        """The reasoning before the answer; None if there is none."""
        return (
            None if self.record["error"] is not None else _extract_reasoning(self.record["response"]["body"])
        )

    @property
    def eval(self) -> Mapping[str, Any]:
        """The result of scoring; empty if the line is not scored."""
        found = self.record.get("eval")
        return found if isinstance(found, dict) else {}

    @property
    def score(self) -> float | None:
        """From 0 to 1; None if the line is not scored."""
        found = self.eval.get("score")
        return found if isinstance(found, int | float) else None

    @property
    def group(self) -> str | None:
        """The group in which the line is scored; None if it is not."""
        return str(self.eval.get("group", "all")) if self.eval else None

    @property
    def finish(self) -> str | None:
        """Why the answer ended, in the words of its API (`stop`, `length`, `end_turn`, `completed`); None
        for a failed line, and for embeddings and scores."""
        if self.record["error"] is not None:
            return None
        body = self.record["response"]["body"]
        if "choices" in body:
            return str(body["choices"][0].get("finish_reason"))
        reason = (body.get("incomplete_details") or {}).get("reason")
        found = reason or body.get("stop_reason") or body.get("status")
        return None if found is None else str(found)

    @property
    def error(self) -> str | None:
        """Why the line failed; None if it did not."""
        found = self.record["error"]
        return None if found is None else str(found["message"])


def _extract_reasoning(body: Mapping[str, Any]) -> str | None:
    """The reasoning of a response body's first choice, of a response or of a message; embeddings and scores
    have none."""
    if "choices" in body:
        found = (body["choices"][0].get("message") or {}).get("reasoning_content")
        return found if isinstance(found, str) else None
    items = body.get("output", body.get("content", ()))
    texts = [item["thinking"] for item in items if item["type"] == "thinking"]
    for item in items:
        if item["type"] == "reasoning":
            texts += [part["text"] for part in item.get("content") or item.get("summary") or ()]
    return "".join(texts) if texts else None
