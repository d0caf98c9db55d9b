"""An answer that the request has begun: its prompt ends with that text, and the answer goes on from there.

The text stands at the prompt's very end, as it was sent, or the request is refused: what a template makes of
it is never guessed. The answer does not repeat it, but for a call that it begins: half a call is none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mlxrun.text.detokenize import special_ids
from mlxrun.text.field_errors import bad, quote, unsupported
from mlxrun.text.formats import Delta, Kind, Parser, TextDelta
from mlxrun.text.messages import Message
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import render

CONTINUE, BEGIN = "continue_final_message", "add_generation_prompt"
_TAIL = 32  # characters, or tokens, that say how a tokenizer writes what follows them


def continued(given: Mapping[str, Any]) -> str | None:
    """The path of the message that a chat body asks to be continued; None: the answer is a new message."""
    if not given.get(CONTINUE):
        if given.get(BEGIN) is False:
            raise unsupported(BEGIN, f"false is taken only with {CONTINUE}: true")
        return None
    if given.get(BEGIN):
        raise bad(BEGIN, f"begins another message; not together with {CONTINUE}: true")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return "messages"  # the messages are refused, whatever is done with the last
    where, last = f"messages[{len(messages) - 1}]", messages[-1]
    if last.get("role") != "assistant":
        found = quote(last.get("role"))
        raise bad(CONTINUE, f"needs a last message of the assistant, but {where} is of {found}")
    if last.get("tool_calls"):
        raise bad(f"{where}.tool_calls", f"a message with calls is whole; {CONTINUE} is for text")
    return f"{where}.content"


def render_open(
    host: ModelInfo,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
    param: str,
) -> str:
    """The prompt as text, up to the end of the last message's content; RequestError naming `param` if the
    template has that otherwise than it was sent."""
    *before, last = messages
    text: str = last["content"]
    mark = f"Zq{secrets.token_hex(8)}"  # which no message has; no template takes it for anything but text

    def upto(content: str) -> str | None:
        """What is rendered before the end of `content`; None: that is not there."""
        marked = [*before, {**last, "content": content + mark}]
        whole = render(host, marked, tools, arguments, begin=False)
        return whole.rpartition(mark)[0] if mark in whole else None

    found = upto(text)
    if found is None or not found.endswith(text):
        raise bad(param, "cannot be continued: the model's chat template changes this text, or leaves it out")
    # White space that a template drops may be followed by the template's own: an end that is right by chance.
    if text[:1].isspace() and upto("") != found[: -len(text)]:
        raise bad(param, "cannot be continued: the model's chat template drops white space at its beginning")
    return found


class PrefilledParser:
    """The parser of an answer that goes on from `prefill` (see formats.Parser): its state is as if it had
    read that, and what it gives is new. Calls that `prefill` begins are given whole; what the model then
    breaks of one is text."""

    def __init__(self, make: Callable[[], Parser], prefill: str) -> None:
        self._parser = make()
        given = self._parser.feed(prefill)
        self._first = [delta for delta in given if delta.kind == "call"]
        twin = make()
        twin.feed(prefill)
        rest = twin.finish()
        self._held = ""  # what may come again, as it may be part of a marker; of these kinds:
        self._kinds: tuple[Kind, ...] = ("text", "reasoning")
        held = [delta for delta in rest if delta.kind != "call"]
        if held:
            self._kinds = (held[0].kind,)
            self._held = "".join(delta.text for delta in held if delta.kind == held[0].kind)
        elif rest and not self._first:  # a call, if nothing followed: else it is text
            self._held = prefill[prefill.rfind(given[-1].text) + len(given[-1].text) :] if given else prefill
        else:
            self._held = prefill[len(prefill.rstrip()) :]  # which is dropped at the end of a thought
        self._seen = ""

    @property
    def markers(self) -> Collection[str]:
        """See formats.Parser."""
        return self._parser.markers

    def feed(self, text: str) -> Sequence[Delta]:
        """What `text` makes certain."""
        made = self._parser.feed(text)
        return self._new(made) if self._held or self._first else made

    def finish(self) -> Sequence[Delta]:
        """The rest."""
        made = self._new(self._parser.finish())
        self._seen = ""  # a beginning of what was held back: nothing new
        return made

    def _new(self, made: Sequence[Delta]) -> list[Delta]:
        """The pieces without what was held back, if it turns out to be text."""
        first, self._first = self._first, []
        new = list(first)
        for delta in made:
            if self._held and delta.kind in self._kinds:
                self._seen += delta.text
                if self._held.startswith(self._seen) and self._seen != self._held:
                    continue
                text = self._seen.removeprefix(self._held)
                self._held = self._seen = ""
                if text:
                    new.append(TextDelta(text, delta.kind))
            else:
                self._held = ""  # it was a marker
                new.append(delta)
        return new


def tail_ids(host: ModelInfo, prefill: str) -> tuple[int, ...]:
    """Tokens of the end of a prefill, from which a detokenizer sees whether a space begins what follows."""
    return tuple(host.tokenizer(prefill[-_TAIL:], add_special_tokens=False)["input_ids"]) if prefill else ()


def prompt_ids(host: ModelInfo, prompt: Sequence[int]) -> tuple[int, ...]:
    """Newest tokens of a prompt that are text, for the same; of a character that is not whole there, none."""
    backend = host.tokenizer.backend_tokenizer
    special = special_ids(backend)
    ids = [token for token in prompt[-_TAIL:] if token not in special]
    while ids and backend.decode(ids, skip_special_tokens=True).endswith("\ufffd"):
        ids.pop()
    return tuple(ids)
