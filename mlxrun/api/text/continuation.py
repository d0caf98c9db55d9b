"""Answers that continue a text of the request: the prompt ends with that text and the answer follows it.

The prompt ends with the text exactly as it was sent. If the chat template changes the text, the request is
refused. The answer does not repeat the text, except for a tool call that the text begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mlxrun.api.parsers.delta import Delta, DeltaKind, Parser
from mlxrun.api.text.messages import Message
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import render_chat
from mlxrun.api.text.tokens.detokenize import get_special_ids
from mlxrun.core.field_errors import quote, reject, reject_unsupported

CONTINUE_FINAL_MESSAGE, ADD_GENERATION_PROMPT = "continue_final_message", "add_generation_prompt"
_TAIL_LENGTH = 32  # characters, or tokens, that decide how a tokenizer writes what follows them


def get_continued_path(given: Mapping[str, Any]) -> str | None:
    """Return the path of the content that a chat body asks to continue; None: the answer is a new message.

    The fields are vLLM's. RequestError if they contradict each other or the last message."""
    if not given.get(CONTINUE_FINAL_MESSAGE):
        if given.get(ADD_GENERATION_PROMPT) is False:
            reason = f"false is supported only with {CONTINUE_FINAL_MESSAGE}: true"
            reject_unsupported(ADD_GENERATION_PROMPT, reason)
        return None
    if given.get(ADD_GENERATION_PROMPT):
        reject(ADD_GENERATION_PROMPT, f"cannot be true together with {CONTINUE_FINAL_MESSAGE}: true")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return "messages"  # normalize_messages refuses them
    where, last = f"messages[{len(messages) - 1}]", messages[-1]
    if last.get("role") != "assistant":
        found = f"{where} has role {quote(last.get('role'))}"
        reject(CONTINUE_FINAL_MESSAGE, f"the last message must be the assistant's, but {found}")
    if last.get("tool_calls"):
        reject(f"{where}.tool_calls", f"{CONTINUE_FINAL_MESSAGE} does not support tool calls")
    return f"{where}.content"


def render_continuation(
    model: ModelInfo,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
    param: str,
) -> str:
    """Render the prompt up to the end of the last message's content. RequestError naming `param` if the
    template does not render that content as it was sent."""
    *before, last = messages
    text: str = last["content"]
    mark = f"Zq{secrets.token_hex(8)}"  # occurs in no message, and templates treat it as ordinary text

    def render_until_end_of(content: str) -> str | None:
        """The prompt up to the end of `content`; None: the template does not render the end."""
        marked = [*before, {**last, "content": content + mark}]
        whole = render_chat(model, marked, tools, arguments, add_generation_prompt=False)
        return whole.rpartition(mark)[0] if mark in whole else None

    found = render_until_end_of(text)
    if found is None or not found.endswith(text):
        reject(param, "cannot be continued: the model's chat template changes this text, or leaves it out")
    # The template may replace white space that it drops by its own: an end that is equal by chance.
    if text[:1].isspace() and render_until_end_of("") != found[: -len(text)]:
        reject(param, "cannot be continued: the model's chat template drops white space at its beginning")
    return found


class ContinuationParser:
    """The parser of an answer that continues a text. It parses that text first, and returns only what
    follows. A call that the text begins is returned whole. If the model breaks that call off, the rest is
    content."""

    def __init__(self, make: Callable[[], Parser], continuation: str) -> None:
        self._parser = make()
        parsed = self._parser.feed(continuation)
        self._begun_calls = [delta for delta in parsed if delta.kind == "call"]
        twin = make()
        twin.feed(continuation)
        rest = twin.finish()
        # The end of the text, which the parser withholds while it may begin a marker. If it does not, it is
        # returned again as deltas of these kinds.
        self._withheld = ""
        self._kinds: tuple[DeltaKind, ...] = ("content", "reasoning")
        texts = [delta for delta in rest if delta.kind != "call"]
        if texts:
            self._kinds = (texts[0].kind,)
            self._withheld = "".join(delta.text for delta in texts if delta.kind == texts[0].kind)
        elif rest and not self._begun_calls:  # a call if the text ends here, else content
            last = parsed[-1].text if parsed else ""
            self._withheld = continuation[continuation.rfind(last) + len(last) :] if parsed else continuation
        else:
            space = continuation[len(continuation.rstrip()) :]  # dropped at the end of reasoning
            returned = bool(parsed) and parsed[-1].kind != "call" and parsed[-1].text.endswith(space)
            self._withheld = "" if returned else space
        self._repeated = ""  # how much of it was returned again

    @property
    def markers(self) -> Collection[str]:
        """See delta.Parser."""
        return self._parser.markers

    def feed(self, text: str) -> Sequence[Delta]:
        """Return the deltas that `text` makes certain."""
        deltas = self._parser.feed(text)
        return self._select_new(deltas) if self._withheld or self._begun_calls else deltas

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        """Return the deltas that were withheld."""
        deltas = self._select_new(self._parser.finish(stopped))
        self._repeated = ""  # a beginning of the withheld text: nothing new
        return deltas

    def _select_new(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The deltas without the withheld text, if it turns out to be text."""
        new, self._begun_calls = self._begun_calls, []
        for delta in deltas:
            if self._withheld and delta.kind in self._kinds:
                self._repeated += delta.text
                if self._withheld.startswith(self._repeated) and self._repeated != self._withheld:
                    continue
                text = self._repeated.removeprefix(self._withheld)
                self._withheld = self._repeated = ""
                if text:
                    new.append(Delta(delta.kind, text))
            else:
                self._withheld = ""  # it began a marker
                new.append(delta)
        return new


def get_continuation_tail_ids(model: ModelInfo, continuation: str) -> tuple[int, ...]:
    """Return the tokens of the end of a continued text. They tell a detokenizer whether a space follows."""
    if not continuation:
        return ()
    return tuple(model.tokenizer(continuation[-_TAIL_LENGTH:], add_special_tokens=False)["input_ids"])


def get_prompt_tail_ids(model: ModelInfo, prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the last text tokens of a prompt, for the same use. Those of an incomplete character are left
    out."""
    backend = model.tokenizer.backend_tokenizer
    special = get_special_ids(backend)
    ids = [token for token in prompt[-_TAIL_LENGTH:] if token not in special]
    while ids and backend.decode(ids, skip_special_tokens=True).endswith("\ufffd"):
        ids.pop()
    return tuple(ids)
