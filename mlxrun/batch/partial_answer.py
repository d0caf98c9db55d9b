"""One answer under way, and the records that hold it: one JSON object a line, each with its own check.

    {"key": K, "choice": 0, "of": D, "at": 17, "tokens": [..], "logprobs": [[-0.5, [[12, -0.5]]]],
     "finish": null, "check": C}

`at` is how many tokens of this choice came before, 0 begins it anew; `of` is a digest of what was asked, as
tokens; `logprobs` is as long as `tokens` or empty. `check` is a digest of all bytes before it: what is torn,
edited or of another format is no record, and what then no longer joins on to its tokens is passed over.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxrun.scheduler.request import FinishReason, Request, TokenEvent, TokenLogprob

_FORMAT = b"mlxrun answers 1"
_CHECK = b',"check":"'
_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Half:
    """What is known of one choice of one line."""

    of: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    saved: int = 0  # tokens that records hold
    finish_saved: bool = False

    def add(self, event: TokenEvent) -> None:
        """Take in what the engine said."""
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        if event.finish in _ENDS:
            self.finish = event.finish

    def fits(self, request: Request) -> bool:
        """Whether this is the beginning of an answer to `request`."""
        wanted = 0 if request.params.logprobs is None else len(self.tokens)
        return self.of == asked(request) and len(self.logprobs) == wanted

    def ended(self, request: Request, context: int) -> FinishReason | None:
        """Why the answer is complete already, if it is."""
        most = min(request.params.max_tokens, context - len(request.prompt))
        if self.finish is None and self.tokens and len(self.tokens) >= most:
            return FinishReason.LENGTH
        return self.finish

    def news(self, key: str, choice: int) -> bytes:
        """A record of what none holds yet; empty if there is nothing. `keep` once it is written."""
        if self.saved == len(self.tokens) and (self.finish is None or self.finish_saved):
            return b""
        fields = {
            "key": key,
            "choice": choice,
            "of": self.of,
            "at": self.saved,
            "tokens": self.tokens[self.saved :],
            "logprobs": [(each.logprob, each.top) for each in self.logprobs[self.saved :]],
            "finish": self.finish,
        }
        data = json.dumps(fields, separators=(",", ":")).encode()[:-1]
        return data + _CHECK + _digest(data).encode() + b'"}\n'

    def whole(self) -> Half:
        """The same, as if no record held any of it."""
        return Half(self.of, self.tokens, self.logprobs, self.finish)

    def keep(self) -> None:
        """All there is, is written."""
        self.saved, self.finish_saved = len(self.tokens), self.finish is not None


def asked(request: Request) -> str:
    """Digest of what the line's key does not fix: a template may put the date into a prompt."""
    digest = hashlib.blake2b(str(request.params.seed).encode(), digest_size=8)
    digest.update(array("q", request.prompt).tobytes())
    for image in request.image_digests:
        digest.update(image)
    return digest.hexdigest()


def parse(data: bytes) -> tuple[str, int, int, Half] | None:
    """Key, choice, `at` and content of a line that `news` wrote, or None."""
    head, found, check = data.rpartition(_CHECK)
    if not found or check != _digest(head).encode() + b'"}\n':
        return None
    try:
        value = json.loads(head + b"}")
        logprobs = [TokenLogprob(own, tuple((t, p) for t, p in top)) for own, top in value["logprobs"]]
        finish = FinishReason(value["finish"]) if value["finish"] else None
        half = Half(value["of"], value["tokens"], logprobs, finish)
        return value["key"], value["choice"], value["at"], half
    except (ValueError, KeyError, TypeError):
        return None


def collect(lines: Iterable[bytes]) -> dict[str, dict[int, Half]]:
    """The choices that records hold, by key."""
    found: dict[str, dict[int, Half]] = {}
    for data in lines:
        record = parse(data)
        if record is None:
            continue
        key, choice, at, more = record
        halves = found.setdefault(key, {})
        half = halves.get(choice)
        if at == 0:
            halves[choice] = more
        elif half is not None and (half.of, len(half.tokens), half.finish) == (more.of, at, None):
            half.tokens += more.tokens
            half.logprobs += more.logprobs
            half.finish = more.finish
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8, person=_FORMAT).hexdigest()
