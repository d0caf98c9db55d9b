"""From checked input to prompt tokens. Synchronous and slow for long texts: called on a worker thread.

Chat text is tokenised as rendered (the template writes its own special tokens), raw text with the
tokenizer's. A special token spelled in a message counts as that token, as in every server that renders
templates to text; only the ones that stand for images are refused, since they would shift every image after
them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxrun.errors import MediaError, MlxrunError
from mlxrun.text.boundaries import boundaries, expand
from mlxrun.text.continuation import render_open
from mlxrun.text.field_errors import bad, shorten, strings
from mlxrun.text.messages import Message
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import Places, places, render
from mlxrun.text.tokens import tokenise

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Tokens; for images where they are, what fills them and the digests of that; and the positions where
    other prompts are likely to part from this one. `text` is what was tokenised, or the ids' text; `prefill`
    the end of it that the answer goes on from."""

    text: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] = ()
    media: Any = None
    digests: tuple[bytes, ...] = ()
    boundaries: tuple[int, ...] = ()
    prefill: str = ""

    @property
    def before(self) -> str:
        """The text without `prefill`."""
        return self.text.removesuffix(self.prefill)


def check_text(value: Any, param: str, marks: Places) -> None:
    """Refuses strings that cannot be tokenised, or that would be taken for an image."""
    for path, text in strings(value, param):
        if not text.isascii() and not _encodes(text):
            raise bad(path, "has half of a surrogate pair, which is not Unicode text")
        token = marks.reserved_in(text)
        if token is not None:
            raise bad(
                path, f"has the model's media token {token!r} as text; leave it out or write it otherwise"
            )


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def chat_prompt(
    host: ModelInfo,
    messages: Sequence[Message],
    images: Sequence[Image],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
    open_at: str | None = None,
) -> RenderedPrompt:
    """A conversation, rendered and tokenised; only with images does the model's processor see it. `open_at`:
    the path of the last message's content if the answer goes on from that."""
    if open_at is None:
        text = render(host, messages, tools, arguments)
    else:
        text = render_open(host, messages, tools, arguments, open_at)
    tokens = tokenise(host, text, special=False)
    places(host).check(tokens.ids, len(images))
    if not images:
        found = boundaries(host, tokens, messages, tools, arguments)
        return RenderedPrompt(text, tokens.ids, boundaries=found)
    try:
        done = host.process(text, images)
    except MediaError as exc:
        if exc.param is not None:
            raise
        raise MediaError(f"messages: {exc}", param="messages") from exc
    except MlxrunError:
        raise
    except Exception as exc:  # a border: the model's own processor, and images it was never tried with
        logger.warning("image processor failed", exc_info=True)
        reason = shorten(str(exc), 200) or type(exc).__name__
        raise MediaError(
            f"messages: the model's processor refuses the images: {reason}", param="messages"
        ) from exc
    found = boundaries(host, tokens, messages, tools, arguments)
    found = expand(found, tokens.ids, done.ids, done.spans)
    digests = getattr(done, "digests", ())
    return RenderedPrompt(text, done.ids, done.spans, done.media, digests, found)


def raw_prompt(host: ModelInfo, prompt: str | Sequence[int], param: str) -> RenderedPrompt:
    """A prompt of /v1/completions: text, or token ids as they are."""
    marks = places(host)
    if isinstance(prompt, str):
        check_text(prompt, param, marks)
        ids = tokenise(host, prompt, special=True).ids
        text = prompt
    else:
        ids = tuple(prompt)
        check_ids(host, ids, param)
        text = host.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not ids:
        raise bad(param, "is empty; give at least one token")
    return RenderedPrompt(text, ids)


def check_ids(host: ModelInfo, ids: Sequence[int], param: str) -> None:
    """Refuses ids outside the vocabulary, and those that stand for images."""
    size, media = len(host.tokenizer), set(places(host).reserved.values())
    for i, token in enumerate(ids):
        if not 0 <= token < size:
            raise bad(f"{param}[{i}]", f"{token} is not a token id; the vocabulary has {size}")
        if token in media:
            raise bad(
                f"{param}[{i}]", f"{token} is the model's token for media, which a raw prompt cannot hold"
            )
