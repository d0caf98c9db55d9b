"""The chunks of one OpenAI stream, as JSON text: for each choice the role, its pieces, and why it ended.

`chunk` is a chunk as an object. Streams make one a token, so a plain piece is put into text that was made
once of such an object; what is rare (logprobs, a call's name) is made as an object each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from mlxrun.api.choice import Choice, AnswerToken
from mlxrun.api.openai.response import Json, build_chat_logprobs, build_completion_logprobs, build_usage
from mlxrun.api.prepared import PreparedRequest
from mlxrun.parsers.delta import Delta

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_HOLE = "\0"  # where the piece goes; nothing that is not ours comes after it in a chunk


class ChunkWriter:
    """Makes the chunks of one request's stream; one object a stream."""

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
        self._logs = any(request.params.logprobs is not None for request in prepared.requests)
        self._logged: dict[int, int] = {}  # how many tokens' logprobs a choice has given
        self._frames: dict[tuple[int, str, int], tuple[str, str]] = {}
        self._choices: dict[int, Choice] = {}

    def write(self, choice: Choice, pieces: Sequence[Delta]) -> list[str]:
        """The chunks that say what came of a choice; with `finish_reason` set, the last of them too."""
        if not pieces and choice.finish_reason is None:
            return []
        made = [] if choice.index in self._choices else self._first(choice, pieces)
        if self._logs:
            made += self._with_logprobs(choice, pieces)
        elif len(pieces) == 1 and pieces[0].text and not pieces[0].id:
            made.append(self._framed(choice.index, pieces[0]))
        else:
            made += [self._framed(choice.index, piece) for piece in join_deltas(pieces)]
        if choice.finish_reason is not None:
            made.append(self._last(choice))
        return made

    def write_usage(self) -> str:
        """The chunk after the last choice's end, if `include_usage` was asked for."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return _dumps({**self._head, "choices": [], "usage": build_usage(self._prepared, choices)})

    def make_chunk(
        self,
        index: int,
        content: Json,
        logprobs: Json | None = None,
        finish: str | None = None,
    ) -> Json:
        """One chunk of one choice. `content`: `{"delta": ...}` of a chat, `{"text": ...}` of a completion."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice], **self._tail}

    def make_content(self, piece: Delta) -> Json:
        """What a chunk says of a piece. A call's id and name come without arguments, its fragments alone."""
        if not self._chat:
            return {"text": piece.text}
        if piece.kind != "call":
            return {"delta": {"content" if piece.kind == "content" else "reasoning_content": piece.text}}
        call: Json = {"index": piece.index, "function": {"arguments": piece.text}}
        if piece.id:
            function = {"name": piece.name, "arguments": piece.text}
            call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        return {"delta": {"tool_calls": [call]}}

    def _first(self, choice: Choice, pieces: Sequence[Delta]) -> list[str]:
        """The role, or the prompt where it is echoed."""
        self._choices[choice.index] = choice
        if not self._chat:
            echoes = self._prepared.echoed_prompts
            text = echoes[choice.index // self._prepared.n] if echoes else ""
            return [_dumps(self.make_chunk(choice.index, {"text": text}))] if text else []
        content = None if pieces and pieces[0].kind == "call" else ""
        delta = {"role": "assistant", "content": content, "refusal": None}
        return [_dumps(self.make_chunk(choice.index, {"delta": delta}))]

    def _with_logprobs(self, choice: Choice, pieces: Sequence[Delta]) -> list[str]:
        """The last chunk has the logprobs of all tokens that became certain with these pieces."""
        contents = [self.make_content(piece) for piece in join_deltas(pieces)]
        if not contents:
            return []
        last = self.make_chunk(choice.index, contents.pop(), self._logprobs(choice))
        return [_dumps(self.make_chunk(choice.index, content)) for content in contents] + [_dumps(last)]

    def _last(self, choice: Choice) -> str:
        """Why it ended, the seed that was used, and the logprobs of tokens that are no text."""
        logprobs = self._logprobs(choice) if self._logs else None
        content: Json = {"delta": {}} if self._chat else {"text": ""}
        chunk = self.make_chunk(choice.index, content, logprobs, choice.finish_reason)
        return _dumps({**chunk, "mlxrun": {"seed": self._prepared.seed}})

    def _framed(self, index: int, piece: Delta) -> str:
        if piece.id:
            return _dumps(self.make_chunk(index, self.make_content(piece)))
        key = (index, piece.kind, piece.index)
        frame = self._frames.get(key)
        if frame is None:
            hole = self.make_content(Delta(piece.kind, _HOLE, piece.index))
            before, _, after = _dumps(self.make_chunk(index, hole)).rpartition(_dumps(_HOLE))
            frame = self._frames[key] = (before, after)
        return f"{frame[0]}{_dumps(piece.text)}{frame[1]}"

    def _logprobs(self, choice: Choice) -> Json | None:
        """Of the tokens that are certain by now and were not given yet."""
        start = self._logged.get(choice.index, 0)
        tokens: list[AnswerToken] = choice.get_tokens_with_logprobs(start)
        self._logged[choice.index] = start + len(tokens)
        if not tokens:
            return None
        return build_chat_logprobs(tokens) if self._chat else build_completion_logprobs(tokens)


def join_deltas(pieces: Sequence[Delta]) -> Iterator[Delta]:
    """Pieces as chunks have them: neighbours of a kind as one, so that a slow reader gets few large chunks;
    a call's id and name apart from its arguments; none that says nothing."""
    for _, group in groupby(pieces, key=lambda piece: (piece.kind, piece.index)):
        same = list(group)
        first = same[0]
        if first.id:
            yield Delta(first.kind, "", first.index, first.id, first.name)
        text = "".join(piece.text for piece in same)
        if text:
            yield Delta(first.kind, text, first.index)
