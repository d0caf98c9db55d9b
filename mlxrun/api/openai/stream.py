"""Writes the chunks of OpenAI streams as JSON text: per choice the role, its deltas, and why it ended.

A stream has a chunk per token, so the JSON around the text of a plain delta is encoded once. Rare chunks
(with logprobs, or a call's name) are encoded each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from mlxrun.api.choice import Choice
from mlxrun.api.openai.response import (
    Json,
    build_echoed_logprobs,
    build_logprobs,
    build_prompt_ids,
    build_usage,
)
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.prepared import PreparedRequest

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_HOLE = "\0"  # where the text is inserted; only fields of ours follow it in a chunk


class ChunkWriter:
    """Writes the chunks of one request's stream."""

    def __init__(
        self, prepared: PreparedRequest, request_id: str, created: int, fingerprint: str | None = None
    ) -> None:
        chat = prepared.kind == "chat"
        self._prepared = prepared
        self._chat = chat
        self._head: Json = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": prepared.model,
            "system_fingerprint": fingerprint,
        }
        self._tail: Json = {"usage": None} if prepared.include_usage else {}
        # Each chunk is encoded by itself if it has more than text: logprobs, token ids or token counts.
        extras = (prepared.has_logprobs, prepared.returns_token_ids, prepared.continuous_usage)
        self._is_plain = not any(extras)
        self._logprobs_sent: dict[int, int] = {}  # tokens per choice
        self._ids_sent: dict[int, int] = {}  # the same
        self._templates: dict[tuple[int, str, int], tuple[str, str]] = {}
        self._choices: dict[int, Choice] = {}

    def write(self, choice: Choice, deltas: Sequence[Delta]) -> list[str]:
        """Write the chunks of these deltas, and the choice's last chunk once it has a `finish_reason`."""
        if not deltas and choice.finish_reason is None:
            return []
        chunks = [] if choice.index in self._choices else self._write_first(choice, deltas)
        if not self._is_plain:
            chunks += self._write_with_extras(choice, deltas)
        elif len(deltas) == 1 and deltas[0].text and not deltas[0].id:
            chunks.append(self._write_delta(choice.index, deltas[0]))
        else:
            chunks += [self._write_delta(choice.index, delta) for delta in join_deltas(deltas)]
        if choice.finish_reason is not None:
            chunks.append(self._write_last(choice))
        return chunks

    def write_usage(self) -> str:
        """Write the token counts that follow the last choice, for requests with `include_usage`."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return _dumps({**self._head, "choices": [], "usage": build_usage(self._prepared, choices)})

    def make_chunk(
        self, index: int, content: Json, logprobs: Json | None = None, finish: str | None = None
    ) -> Json:
        """Make a chunk of a choice. `content`: a chat's `{"delta": ...}`, a completion's `{"text": ...}`."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        tail = self._tail
        if self._prepared.continuous_usage:
            own = len(self._prepared.requests[index].prompt)
            tail = {"usage": build_usage(self._prepared, [self._choices[index]], own)}
        return {**self._head, "choices": [choice], **tail}

    def make_content(self, delta: Delta) -> Json:
        """Make the `content` of make_chunk. A call's id and name are in its first delta."""
        if not self._chat:
            return {"text": delta.text}
        if delta.kind != "call":
            return {"delta": {"content" if delta.kind == "content" else "reasoning_content": delta.text}}
        call: Json = {"index": delta.index, "function": {"arguments": delta.text}}
        if delta.id:
            function = {"name": delta.name, "arguments": delta.text}
            call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        return {"delta": {"tool_calls": [call]}}

    def _write_first(self, choice: Choice, deltas: Sequence[Delta]) -> list[str]:
        """The role, or the prompt if it is echoed, and the prompt's ids if they are wanted."""
        self._choices[choice.index] = choice
        ids = self._prepared.returns_token_ids
        if not self._chat:
            prompts = self._prepared.echoed_prompts
            text = prompts[choice.index // self._prepared.n] if prompts else ""
            extras = build_prompt_ids(self._prepared, choice.index) | {"token_ids": []} if ids else {}
            has_echo = bool(self._prepared.echoed_offsets)
            logprobs = build_echoed_logprobs(self._prepared, choice) if has_echo else None
            chunk = self.make_chunk(choice.index, {"text": text, **extras}, logprobs)
            return [_dumps(chunk)] if text or ids or has_echo else []
        content = None if deltas and deltas[0].kind == "call" else ""
        role = {"role": "assistant", "content": content, "refusal": None}
        chunk = self.make_chunk(choice.index, {"delta": role})
        if ids and len(self._choices) == 1:
            chunk["prompt_token_ids"] = list(self._prepared.requests[0].prompt)
        return [_dumps(chunk)]

    def _write_with_extras(self, choice: Choice, deltas: Sequence[Delta]) -> list[str]:
        """The last chunk has the logprobs of all tokens that became certain with these deltas, and the ids of
        all tokens so far that were not sent."""
        contents = [self.make_content(delta) for delta in join_deltas(deltas)]
        if not contents:
            return []
        contents[-1] |= self._take_ids(choice)
        last = self.make_chunk(choice.index, contents.pop(), self._take_logprobs(choice))
        return [_dumps(self.make_chunk(choice.index, content)) for content in contents] + [_dumps(last)]

    def _write_last(self, choice: Choice) -> str:
        """Why the choice ended, the seed, and the logprobs and ids of tokens without text."""
        content: Json = {"delta": {}} if self._chat else {"text": ""}
        content |= self._take_ids(choice)
        chunk = self.make_chunk(choice.index, content, self._take_logprobs(choice), choice.finish_reason)
        return _dumps({**chunk, "mlxrun": {"seed": self._prepared.seed}})

    def _write_delta(self, index: int, delta: Delta) -> str:
        if delta.id:
            return _dumps(self.make_chunk(index, self.make_content(delta)))
        key = (index, delta.kind, delta.index)
        if key not in self._templates:
            content = self.make_content(Delta(delta.kind, _HOLE, delta.index))
            before, _, after = _dumps(self.make_chunk(index, content)).rpartition(_dumps(_HOLE))
            self._templates[key] = before, after
        before, after = self._templates[key]
        return f"{before}{_dumps(delta.text)}{after}"

    def _take_ids(self, choice: Choice) -> Json:
        """The field with the ids of tokens that were not sent yet, if they are wanted."""
        if not self._prepared.returns_token_ids:
            return {}
        start = self._ids_sent.get(choice.index, 0)
        self._ids_sent[choice.index] = len(choice.token_ids)
        return {"token_ids": choice.token_ids[start:]}

    def _take_logprobs(self, choice: Choice) -> Json | None:
        """Those of tokens that are certain by now and were not sent yet."""
        start = self._logprobs_sent.get(choice.index, 0)
        tokens = choice.get_tokens_with_logprobs(start)
        self._logprobs_sent[choice.index] = start + len(tokens)
        return build_logprobs(self._prepared, choice.index, tokens) if tokens else None


def join_deltas(deltas: Sequence[Delta]) -> Iterator[Delta]:
    """Join neighbouring deltas of a kind, so that a slow reader gets few large chunks. The id and name of a
    call become a delta of their own. Empty deltas are dropped."""
    for _, group in groupby(deltas, key=lambda delta: (delta.kind, delta.index)):
        same = list(group)
        first = same[0]
        if first.id:
            yield Delta(first.kind, "", first.index, first.id, first.name)
        text = "".join(delta.text for delta in same)
        if text:
            yield Delta(first.kind, text, first.index)
