"""answers.jsonl: the partial answers of running lines, with which a killed job continues inside its answers.

    {"key": K, "choice": 0, "request": D, "start": 17, "tokens": [..], "logprobs": [[-0.5, [[12, -0.5]]]],
     "finish": null, "stop": null, "check": C}

`request` is a digest of the prompt's tokens. `start` counts this choice's tokens in earlier records; 0
replaces them. `logprobs` is empty or as long as `tokens`. `stop` is the stop id that ended the answer.
`left_out` counts the tokens of the prompt that sparse prefill did not compute; without it there are none.
`check` is a digest of all bytes before it. If the file is missing, damaged or unwritable, tokens are computed
again, and no answer is wrong.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import JobError
from mlxrun.core.request import FinishReason, Request, TokenEvent, TokenLogprob
from mlxrun.jobs.lines.line_index import LineIndex
from mlxrun.jobs.records.checked_lines import dump_checked, parse_checked
from mlxrun.jobs.records.run_paths import Appender

log = logging.getLogger(__name__)
WRITE_EVERY = 1.0  # seconds
COMPACT_FROM = 1 << 20  # bytes; a smaller file is not compacted
_FORMAT = b"mlxrun answers 2"
_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class PartialAnswer:
    """The tokens so far of one choice of one line."""

    request_digest: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_id: int | None = None  # as in TokenEvent
    left_out: int = 0  # `num_left_out` of TokenEvent
    stored: int = 0  # tokens that are in records, and one more once `finish` is

    def add(self, event: TokenEvent) -> None:
        """Add an event of the engine."""
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.left_out = max(self.left_out, event.num_left_out)
        if event.finish in _ENDS:
            self.finish, self.stop_id = event.finish, event.stop_id

    def matches(self, request: Request) -> bool:
        """Whether this is the beginning of an answer to `request`."""
        wanted = 0 if request.params.logprobs is None else len(self.tokens)
        return self.request_digest == digest_request(request) and len(self.logprobs) == wanted

    def find_finish(self, request: Request, context: int) -> FinishReason | None:
        """Return why the answer is complete already, or None if it is not. `context`: the model's context
        length in tokens."""
        most = min(request.params.max_tokens, context - len(request.prompt))
        if self.finish is None and self.tokens and len(self.tokens) >= most:
            return FinishReason.LENGTH
        return self.finish

    def take_record(self, key: str, choice: int) -> bytes:
        """Return a record of the tokens that are not stored yet, and count them as stored. Empty if there are
        none."""
        start, self.stored = self.stored, len(self.tokens) + (self.finish is not None)
        if start == self.stored:
            return b""
        logprobs = [(each.logprob, each.top) for each in self.logprobs[start:]]
        fields = {"key": key, "choice": choice, "request": self.request_digest, "start": start}
        fields |= {"tokens": self.tokens[start:], "logprobs": logprobs}
        fields |= {"finish": self.finish, "stop": self.stop_id}
        fields |= {"left_out": self.left_out} if self.left_out else {}
        return dump_checked(fields, _FORMAT)


class PartialAnswerTable:
    """The partial answers of the running lines, in memory. `keep`: False for `engine.reproducible`, which
    continues no answer. Known tokens would be computed in chunks, not one by one, which changes the last
    digits of what follows."""

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._lines: dict[str, dict[int, PartialAnswer]] = {}

    def __len__(self) -> int:
        """The number of lines with partial answers."""
        return len(self._lines)

    def find(self, key: str, choice: int, request: Request) -> PartialAnswer:
        """Return the partial answer of this choice, which later events extend. It is empty if its request has
        changed. Answers with logprobs of their prompt begin anew, as these are not kept."""
        if not self._keep or request.params.prompt_logprobs is not None:
            return PartialAnswer(digest_request(request))
        choices = self._lines.setdefault(key, {})
        known = choices.get(choice)
        if known is None or not known.matches(request):
            known = choices[choice] = PartialAnswer(digest_request(request))
        return known

    def remove_line(self, key: str) -> None:
        """Forget a line whose record is written."""
        self._lines.pop(key, None)

    def take_records(self) -> bytes:
        """Return the records of all tokens since the last call."""
        return b"".join(answer.take_record(key, choice) for key, choice, answer in self._iterate())

    def dump_line(self, key: str) -> bytes:
        """Return the records of all known tokens of a line, for another table's `add_records`."""
        choices = self._lines.get(key, {})
        return b"".join(replace(answer, stored=0).take_record(key, at) for at, answer in choices.items())

    def add_records(self, data: bytes) -> None:
        """Add records that another table has taken or dumped."""
        if self._keep:
            parse_records(data.splitlines(keepends=True), self._lines)

    def _iterate(self) -> Iterator[tuple[str, int, PartialAnswer]]:
        return ((key, choice, each) for key, found in self._lines.items() for choice, each in found.items())


class PartialAnswers(PartialAnswerTable):
    """The partial answers of one job, and their file. All methods but `read` belong to the event loop."""

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        super().__init__(keep=keep)
        self._file = Appender(path)
        self._size = 0  # of the file
        self._compact_at = COMPACT_FROM  # bytes; a larger file is rewritten
        self._warned = False

    def read(self, index: LineIndex) -> None:
        """Read the partial answers of unfinished lines, and remove all others from the file."""
        if not self._keep or not self._file.path.exists():
            return
        try:
            with self._file.path.open("rb") as file:
                found = parse_records(file)
        except OSError as error:
            log.warning("%s: cannot be read (%s); no answer is continued", self._file.path, error.strerror)
            found = {}
        self._lines = {key: found[key] for key in index.list_todo_keys() if key in found} if found else {}
        self._write(compact=True)

    def write(self) -> None:
        """Append the tokens since the last call. A file that is too large is rewritten."""
        self._write(compact=self._size > self._compact_at)

    def close(self) -> None:
        """Append the rest, and close the file."""
        self.write()
        self._file.close()

    def delete_file(self) -> None:
        """Delete the file of a complete job."""
        self._file.delete()

    def _write(self, *, compact: bool) -> None:
        """After a failure the next call writes everything again; only the first failure is logged."""
        if compact:
            for _, _, answer in self._iterate():
                answer.stored = 0
        data = self.take_records()
        try:
            if compact:
                self._file.close()
                write_atomically(self._file.path, data, durable=False)
                self._compact_at = max(COMPACT_FROM, 2 * len(data))
            elif data:
                self._file.append(data)
            self._size = len(data) + (0 if compact else self._size)
        except (JobError, OSError) as error:
            self._compact_at = -1
            if not self._warned:
                cause = error.__cause__ or error  # what wraps it names the file again
                reason = getattr(cause, "strerror", None) or cause
                log.warning(
                    "%s: cannot be written (%s); partial answers are not kept", self._file.path, reason
                )
            self._warned = True


def parse_records(
    lines: Iterable[bytes], into: dict[str, dict[int, PartialAnswer]] | None = None
) -> dict[str, dict[int, PartialAnswer]]:
    """Add the choices in records to `into`, by key, and return it. Damaged records are skipped, and so are
    those that continue no other record."""
    found: dict[str, dict[int, PartialAnswer]] = {} if into is None else into
    for value in parse_checked(lines, _FORMAT):
        logprobs = [TokenLogprob(own, tuple((t, p) for t, p in top)) for own, top in value["logprobs"]]
        finish = FinishReason(value["finish"]) if value["finish"] else None
        ends = value.get("stop"), value.get("left_out", 0)
        more = PartialAnswer(value["request"], value["tokens"], logprobs, finish, *ends)
        choices, choice, start = found.setdefault(value["key"], {}), value["choice"], value["start"]
        known = choices.get(choice)
        if start == 0:
            choices[choice] = more
        elif known is not None and (known.request_digest, len(known.tokens), known.finish) == (
            more.request_digest,
            start,
            None,
        ):
            known.tokens += more.tokens
            known.logprobs += more.logprobs
            known.finish, known.stop_id = more.finish, more.stop_id
            known.left_out = max(known.left_out, more.left_out)
    return found


def digest_request(request: Request) -> str:
    """Digest the rendered prompt. It may change under the same line key: a template may insert the date."""
    digest = hashlib.blake2b(str(request.params.seed).encode(), digest_size=8)
    digest.update(array("q", request.prompt).tobytes())
    for image in request.image_digests:
        digest.update(image)
    return digest.hexdigest()
