"""A finished line of a run, as reports, comparisons and exports read it.

A record has the transcript of a line that was answered in several turns, such as by a model with tools. It is
a list of messages as in OpenAI's chat API. Nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlxrun.evals.prompt_messages import PromptMessage, dump_text, list_messages
from mlxrun.jobs.lines.job_file import BadLine, JobLine
from mlxrun.jobs.records.output_records import read_usage
from mlxrun.jobs.scoring.answer_text import REASONING_FIELDS, extract_answer, extract_answers
from mlxrun.jobs.scoring.likeliest import sum_continuations

# Fields of bodies that are the prompt, and those that do not say how to generate.
PROMPT_FIELDS = ("messages", "prompt", "input", "system", "instructions", "tools", "suffix")
_INPUTS = (*PROMPT_FIELDS, "model", "user")


@dataclass(frozen=True)
class RunLine:
    """A finished line of a run. `id`: its custom_id, or `line 7` for a line without its own, and no two lines
    have the same; `number`: its number in the job file, None if that has changed; `line`: the job's line,
    None if it has changed."""

    id: str
    number: int | None
    line: JobLine | BadLine | None
    record: dict[str, Any]

    @property
    def error(self) -> str | None:
        """Why the line failed; None if it did not."""
        found = self.record["error"]
        return None if found is None else str(found["message"])

    @property
    def body(self) -> Mapping[str, Any]:
        """The body of the request; empty if it is unknown, or is no valid request."""
        return self.line.body if isinstance(self.line, JobLine) else {}

    @property
    def response(self) -> Mapping[str, Any]:
        """The response body; empty for a failed line."""
        return {} if self.record["error"] is not None else self.record["response"]["body"]

    @property
    def answer(self) -> str | None:
        """The text to be scored; None for a failed line."""
        return None if self.record["error"] is not None else extract_answer(self.response)

    @cached_property
    def answers(self) -> list[str]:
        """The text of each choice, without reasoning; empty for a failed line."""
        return extract_answers(self.response) if self.response else []

    @property
    def reasoning(self) -> str | None:
        """The reasoning before the answer; None if there is none."""
        return _extract_reasoning(self.response)

    @property
    def finish(self) -> str | None:
        """Why the answer ended, in the words of its API (`stop`, `length`, `end_turn`, `completed`). None for
        a failed line, and for embeddings and reranking."""
        body = self.response
        if "choices" in body:
            return str(body["choices"][0].get("finish_reason"))
        reason = (body.get("incomplete_details") or {}).get("reason")
        found = reason or body.get("stop_reason") or body.get("status")
        return None if found is None else str(found)

    @cached_property
    def tokens(self) -> tuple[int, int]:
        """Prompt and output tokens."""
        return read_usage(self.record)

    @cached_property
    def messages(self) -> list[PromptMessage]:
        """The prompt; empty if it is unknown. If all options follow one context, the prompt is that
        context."""
        contexts = {context for context, _, _ in self.option_logprobs}
        if len(contexts) == 1:
            return [PromptMessage("prompt", contexts.pop())]
        return list_messages(self.body)

    @cached_property
    def prompt(self) -> str:
        """The prompt as one text: the only message's text, or all messages under their roles."""
        texts = [
            each.text
            + "".join(f"\n[{_name_source('image', url)}]" for url in each.images)
            + "".join(f"\n[{_name_source('audio', url)}]" for url in each.sounds)
            for each in self.messages
        ]
        if len(texts) == 1:
            return texts[0]
        return "\n\n".join(f"{each.role}: {text}" for each, text in zip(self.messages, texts, strict=True))

    @cached_property
    def turns(self) -> list[TranscriptTurn]:
        """The transcript of a line that was answered in several turns; empty for other lines."""
        return list_turns(self.record.get("transcript"))

    @property
    def generation(self) -> dict[str, Any]:
        """The fields of the body that say how to generate."""
        return {key: value for key, value in self.body.items() if key not in _INPUTS}

    @property
    def eval(self) -> Mapping[str, Any]:
        """The result of scoring; empty if the line is not scored."""
        found = self.record.get("eval")
        return found if isinstance(found, dict) else {}

    @property
    def score(self) -> float | None:
        """The score from 0 to 1; None if the line is not scored."""
        found = self.eval.get("score")
        return found if isinstance(found, int | float) else None

    @property
    def group(self) -> str | None:
        """The group in which the line is scored; None if it is not."""
        return str(self.eval.get("group", "all")) if self.eval else None

    @property
    def match(self) -> str:
        """How the line is scored; `none` if it is not."""
        return str(self.eval.get("match", "none"))

    @property
    def metrics(self) -> Mapping[str, float]:
        """The named scores of the line, such as `pass@1`, besides its score."""
        return self.eval.get("scores") or {}

    @property
    def targets(self) -> list[str]:
        """The expected answers, each alternative as text; empty if none was given."""
        expected = self.eval.get("expected")
        if expected is None:
            return []
        if isinstance(expected, list) and self.match not in ("json", "json_schema"):
            return [dump_text(each) for each in expected]
        return [dump_text(expected)]

    @property
    def extracted(self) -> str | None:
        """The part of the answer that was compared, as text; None if there was none."""
        found = self.eval.get("extracted")
        return None if found is None else dump_text(found)

    @property
    def options(self) -> list[str]:
        """The texts among which the answer chooses; empty if there are none."""
        texts = self._match_options.get("options") or [text for _, text, _ in self.option_logprobs]
        return [dump_text(each) for each in texts]

    @cached_property
    def option_logprobs(self) -> list[tuple[str, str, float]]:
        """Context, continuation and logprob of each option of a line with the match `likeliest`. Empty for
        other lines, and for those without logprobs."""
        start, choices = self._match_options.get("context_chars"), self.response.get("choices", [])
        if self.match != "likeliest" or start is None:
            return []
        try:
            sums = sum_continuations(choices, start)
        except ValueError:
            return []
        starts = [start] * len(choices) if isinstance(start, int) else start
        return [
            (choice["text"][:at], choice["text"][at:], each.logprob)
            for choice, at, each in zip(choices, starts, sums, strict=True)
        ]

    @property
    def _match_options(self) -> Mapping[str, Any]:
        """The options of the match in the job line's `eval`."""
        return {} if self.line is None or self.line.eval is None else self.line.eval.options


def _extract_reasoning(body: Mapping[str, Any]) -> str | None:
    """The reasoning of a response body's first choice, of a response or of a message; embeddings and
    reranking have none."""
    if "choices" in body:
        found = (body["choices"][0].get("message") or {}).get("reasoning_content")
        return found if isinstance(found, str) else None
    items = body.get("output", body.get("content", ()))
    texts = [item["thinking"] for item in items if item["type"] == "thinking"]
    for item in items:
        if item["type"] == "reasoning":
            texts += [part["text"] for part in item.get("content") or item.get("summary") or ()]
    return "".join(texts) if texts else None


def _name_source(kind: str, url: str) -> str:
    return kind if url.startswith("data:") or not url else f"{kind} {url}"


_OWN = ("tool_calls", "tool_call_id", "name", *REASONING_FIELDS)  # what a turn has apart from its content


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One message of a transcript. `calls`: name and arguments of each tool call, as the model wrote them;
    `tool`: the tool whose result the message is, empty for others."""

    message: PromptMessage
    reasoning: str
    calls: list[tuple[str, str]]
    tool: str


def list_turns(transcript: Any) -> list[TranscriptTurn]:
    """List the turns of a transcript; none if it is no list."""
    names: dict[str, str] = {}
    return [_read_turn(item, names) for item in (transcript if isinstance(transcript, list) else [])]


def _read_turn(item: Any, names: dict[str, str]) -> TranscriptTurn:
    """Read a message. `names`: the tools that were called so far, by the id of the call."""
    fields = item if isinstance(item, Mapping) else {"role": "message", "content": item}
    given = fields.get("tool_calls")
    raw = given if isinstance(given, list) else []
    calls = [_read_call(call) for call in raw]
    for call, (name, _) in zip(raw, calls, strict=True):
        if isinstance(call, Mapping):
            names[str(call.get("id"))] = name
    rest = {key: value for key, value in fields.items() if key not in _OWN}
    (message,) = list_messages({"messages": [{"content": None, **rest}]})
    reasoning = next(
        (text for key in REASONING_FIELDS if isinstance(text := fields.get(key), str) and text), ""
    )
    tool = fields.get("name") or names.get(str(fields.get("tool_call_id")), "")
    return TranscriptTurn(message, reasoning, calls, str(tool) if message.role == "tool" else "")


def _read_call(call: Any) -> tuple[str, str]:
    """Name and arguments of a tool call; a call of another form is all arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        return "", dump_text(call)
    return dump_text(function["name"]), dump_text(function.get("arguments", ""))
