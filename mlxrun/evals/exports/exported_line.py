"""A finished line in the terms that all formats share: prompt, targets, answers, score and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from mlxrun.evals.prompt_messages import PromptMessage, list_messages
from mlxrun.evals.run_folders.run_folder_lines import RunLine
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.output_records import read_usage
from mlxrun.jobs.scoring.answer_text import extract_answers
from mlxrun.jobs.scoring.likeliest import sum_continuations

Json = dict[str, Any]
_INPUTS = ("messages", "prompt", "input", "system", "instructions", "tools", "suffix", "model", "user")


class ExportedLine:
    """A line of a run. `group`: `all` for one that is not scored; `score`: None for one that is not."""

    def __init__(self, found: RunLine) -> None:
        self.found = found
        self.id = found.id
        self.body: Json = found.line.body if isinstance(found.line, JobLine) else {}
        self.eval = found.eval
        self.group = found.group or "all"
        self.score = found.score
        self.error = found.error
        self.match = str(self.eval.get("match", "none"))

    @cached_property
    def messages(self) -> list[PromptMessage]:
        """The prompt; empty if the line is no valid request. Where options follow one context, that."""
        contexts = {context for context, _, _ in self.option_logprobs}
        if len(contexts) == 1:
            return [PromptMessage("prompt", contexts.pop())]
        return list_messages(self.body)

    @cached_property
    def prompt(self) -> str:
        """The prompt as one text: that of the only message, or all messages under their roles."""
        texts = [
            each.text + "".join(f"\n[{_name_image(url)}]" for url in each.images) for each in self.messages
        ]
        if len(texts) == 1:
            return texts[0]
        return "\n\n".join(f"{each.role}: {text}" for each, text in zip(self.messages, texts, strict=True))

    @property
    def generation(self) -> Json:
        """The fields of the body that say how to generate."""
        return {key: value for key, value in self.body.items() if key not in _INPUTS}

    @cached_property
    def response(self) -> Json:
        """The response body; empty for a failed line."""
        return {} if self.error is not None else self.found.record["response"]["body"]

    @cached_property
    def answers(self) -> list[str]:
        """The text of each choice, without reasoning; empty for a failed line."""
        return extract_answers(self.response) if self.response else []

    @property
    def targets(self) -> list[str]:
        """What was expected, each alternative as text; empty if nothing was."""
        expected = self.eval.get("expected")
        if expected is None:
            return []
        if isinstance(expected, list) and self.match not in ("json", "json_schema"):
            return [dump_text(each) for each in expected]
        return [dump_text(expected)]

    @property
    def extracted(self) -> str | None:
        """What was found in the answer, as text; None if nothing was."""
        found = self.eval.get("extracted")
        return None if found is None else dump_text(found)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The named scores of the line, such as `pass@1`, besides its score."""
        return self.eval.get("scores") or {}

    @cached_property
    def tokens(self) -> tuple[int, int]:
        """Prompt and output tokens."""
        return read_usage(self.found.record)

    @property
    def options(self) -> list[str]:
        """The texts among which the answer chooses; empty if there are none."""
        texts = self._match_options.get("options") or [text for _, text, _ in self.option_logprobs]
        return [dump_text(each) for each in texts]

    @cached_property
    def option_logprobs(self) -> list[tuple[str, str, float]]:
        """Context, continuation and logprob of each option of a line that is scored by `likeliest`; empty for
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
        line = self.found.line
        return {} if line is None or line.eval is None else line.eval.options


def dump_text(value: Any) -> str:
    """A value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dump_json(value: Any) -> str:
    """A value as JSON on one line, which can be encoded: lone surrogates are escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def build_usage(prompt: int, output: int) -> Json:
    """Counts of tokens, in the fields that Inspect and Every Eval Ever share."""
    return {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}


def _name_image(url: str) -> str:
    return "image" if url.startswith("data:") or not url else f"image {url}"
