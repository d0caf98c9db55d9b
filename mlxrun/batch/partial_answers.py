"""answers.jsonl: what lines in flight have answered so far, so that a killed job goes on inside its answers.

    {"key": K, "choice": 0, "of": D, "at": 17, "tokens": [..], "logprobs": [[-0.5, [[12, -0.5]]]],
     "finish": null, "check": C}

`of` is a digest of what was asked, as tokens; `at` is how many tokens of this choice came before, 0 begins it
anew; `logprobs` is as long as `tokens` or empty; `check` is a digest of all bytes before it. A file that is
gone, torn, edited or cannot be written costs time, never an answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxrun.batch.line_files import Appender
from mlxrun.batch.line_index import TODO, Index
from mlxrun.batch.run_paths import replace
from mlxrun.errors import JobError
from mlxrun.scheduler.request import FinishReason, Request, TokenEvent, TokenLogprob

log = logging.getLogger(__name__)
WRITE_EVERY = 1.0  # seconds
COMPACT_FROM = 1 << 20  # bytes; a smaller file may hold as much garbage as it likes
_FORMAT = b"mlxrun answers 1"
_CHECK = b',"check":"'
_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class PartialAnswer:
    """What is known of one choice of one line. `of`: digest of what was asked."""

    of: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stored: int = 0  # tokens that records hold, and one more once they hold `finish`

    def add(self, event: TokenEvent) -> None:
        """Take in what the engine said."""
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        if event.finish in _ENDS:
            self.finish = event.finish

    def fits(self, request: Request) -> bool:
        """Whether this is the beginning of an answer to `request`."""
        wanted = 0 if request.params.logprobs is None else len(self.tokens)
        return self.of == digest_request(request) and len(self.logprobs) == wanted

    def ended(self, request: Request, context: int) -> FinishReason | None:
        """Why the answer is complete already, if it is."""
        most = min(request.params.max_tokens, context - len(request.prompt))
        if self.finish is None and self.tokens and len(self.tokens) >= most:
            return FinishReason.LENGTH
        return self.finish

    def take_record(self, key: str, choice: int) -> bytes:
        """What no record holds yet, as one, which from now on counts as stored; empty if there is nothing."""
        start, self.stored = self.stored, len(self.tokens) + (self.finish is not None)
        if start == self.stored:
            return b""
        logprobs = [(each.logprob, each.top) for each in self.logprobs[start:]]
        fields = {"key": key, "choice": choice, "of": self.of, "at": start, "tokens": self.tokens[start:]}
        fields |= {"logprobs": logprobs, "finish": self.finish}
        data = json.dumps(fields, separators=(",", ":")).encode()[:-1]
        return data + _CHECK + _digest(data) + b'"}\n'


class PartialAnswers:
    """The partial answers of one job. All methods belong to the event loop, but `read`.

    `keep`: False for `engine.reproducible`, where answers begin anew: tokens that are known are computed in
    other chunks than one by one, which changes the last digits of what follows.
    """

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self._file = Appender(path)
        self._keep = keep
        self._lines: dict[str, dict[int, PartialAnswer]] = {}
        self._size = 0  # of the file
        self._compact_at = COMPACT_FROM  # bytes; a larger file is written anew
        self._warned = False

    def __len__(self) -> int:
        """Lines that something is known of."""
        return len(self._lines)

    def read(self, index: Index) -> None:
        """Take in what an earlier run left of the lines that are still to do; the rest of it goes."""
        if not self._keep or not self._file.path.exists():
            return
        try:
            with self._file.path.open("rb") as file:
                found = parse_records(file)
        except OSError as error:
            log.warning("%s: cannot be read (%s); answers begin anew", self._file.path, error.strerror)
            found = {}
        todo = (index.row(at).key.hex() for at in range(len(index)) if index.state[at] == TODO)
        self._lines = {key: found[key] for key in todo if key in found} if found else {}
        self._write(anew=True)

    def find(self, key: str, choice: int, request: Request) -> PartialAnswer:
        """What is known of this choice, which goes on from there; nothing if it was asked otherwise."""
        if not self._keep:
            return PartialAnswer(digest_request(request))
        choices = self._lines.setdefault(key, {})
        known = choices.get(choice)
        if known is None or not known.fits(request):
            known = choices[choice] = PartialAnswer(digest_request(request))
        return known

    def drop(self, key: str) -> None:
        """A line is over and its record is written."""
        self._lines.pop(key, None)

    def write(self) -> None:
        """Append what came since the last time; or write anew what is in flight, once that is due."""
        self._write(anew=self._size > self._compact_at)

    def close(self) -> None:
        """Append what is left."""
        self.write()
        self._file.close()

    def remove(self) -> None:
        """The job is complete."""
        self._file.close()
        with suppress(OSError):
            self._file.path.unlink(missing_ok=True)

    def _write(self, *, anew: bool) -> None:
        """What fails is written by the next call, with all that came before, and said once."""
        if anew:
            for _, _, answer in self._all():
                answer.stored = 0
        data = b"".join(answer.take_record(key, choice) for key, choice, answer in self._all())
        try:
            if anew:
                self._file.close()
                replace(self._file.path, data, durable=False)
                self._compact_at = max(COMPACT_FROM, 2 * len(data))
            elif data:
                self._file.append(data)
            self._size = len(data) + (0 if anew else self._size)
        except (JobError, OSError) as error:
            self._compact_at = -1
            if not self._warned:
                log.warning(
                    "%s: cannot be written (%s); partial answers are not kept", self._file.path, error
                )
            self._warned = True

    def _all(self) -> Iterator[tuple[str, int, PartialAnswer]]:
        return ((key, choice, each) for key, found in self._lines.items() for choice, each in found.items())


def parse_records(lines: Iterable[bytes]) -> dict[str, dict[int, PartialAnswer]]:
    """The choices that records hold, by key. What is torn, foreign or joins on to no record is skipped."""
    found: dict[str, dict[int, PartialAnswer]] = {}
    for data in lines:
        head, mark, check = data.rpartition(_CHECK)
        if not mark or check != _digest(head) + b'"}\n':
            continue
        value = json.loads(head + b"}")
        logprobs = [TokenLogprob(own, tuple((t, p) for t, p in top)) for own, top in value["logprobs"]]
        finish = FinishReason(value["finish"]) if value["finish"] else None
        more = PartialAnswer(value["of"], value["tokens"], logprobs, finish)
        choices, choice, start = found.setdefault(value["key"], {}), value["choice"], value["at"]
        known = choices.get(choice)
        if start == 0:
            choices[choice] = more
        elif known is not None and (known.of, len(known.tokens), known.finish) == (more.of, start, None):
            known.tokens += more.tokens
            known.logprobs += more.logprobs
            known.finish = more.finish
    return found


def digest_request(request: Request) -> str:
    """Digest of what the line's key does not fix: a template may put the date into a prompt."""
    digest = hashlib.blake2b(str(request.params.seed).encode(), digest_size=8)
    digest.update(array("q", request.prompt).tobytes())
    for image in request.image_digests:
        digest.update(image)
    return digest.hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8, person=_FORMAT).hexdigest().encode()
