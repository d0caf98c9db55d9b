"""Turns checked messages or text into prompt tokens. Slow for long texts: called on a worker thread.

Chat text is tokenized as rendered (the template writes its special tokens), raw text with the tokenizer's.
A special token that a message spells counts as that token, as in every server that renders templates to text.
Only tokens that stand for images or videos are refused, since they would shift every one after them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxrun.api.text.boundaries import find_boundaries, map_to_expanded
from mlxrun.api.text.continuation import render_continuation
from mlxrun.api.text.messages import Message
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import ImageMarkers, get_image_markers, render_chat
from mlxrun.api.text.tokens.tokens import check_length, tokenize
from mlxrun.config.video_sampling import Video
from mlxrun.core.errors import MediaError, MlxrunError
from mlxrun.core.field_errors import describe_foreign_error, iterate_strings, reject
from mlxrun.core.request import ProcessedPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text and tokens. `image_spans`, `media`, `image_digests` and `boundaries` are those of a
    Request; `continuation` is the end of the text that the answer continues; `offsets` are where the tokens
    begin in the text, if they are known."""

    text: str
    ids: tuple[int, ...]
    image_spans: tuple[tuple[int, int], ...] = ()
    media: Any = None
    image_digests: tuple[bytes, ...] = ()
    boundaries: tuple[int, ...] = ()
    continuation: str = ""
    offsets: tuple[int, ...] = ()

    @property
    def text_before_continuation(self) -> str:
        return self.text.removesuffix(self.continuation)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """`continued_path`: the path of the last message's content, if the answer continues it. `must_fit`: raise
    PromptTooLong before a text is tokenized that is certainly too long for the context."""

    continued_path: str | None = None
    must_fit: bool = False


def check_text(value: Any, param: str, markers: ImageMarkers) -> int:
    """The number of characters of all strings in a value. Refuses strings that cannot be tokenized, or that
    would be read as an image."""
    size = 0
    for path, text in iterate_strings(value, param):
        if not text.isascii() and _SURROGATE.search(text):
            reject(path, "contains half of a surrogate pair, which is not Unicode text")
        token = markers.find_reserved_token(text)
        if token is not None:
            reject(path, f"contains the model's media token {token!r}; remove it or spell it differently")
        size += len(text)
    return size


def build_chat_prompt(
    model: ModelInfo,
    messages: Sequence[Message],
    images: Sequence[Image | Video],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
    options: PromptOptions = PromptOptions(),
) -> RenderedPrompt:
    """Renders and tokenizes a conversation; the model's processor runs only if there are images or videos.
    `images`: both, in the order of their parts."""
    if options.continued_path is None:
        text = render_chat(model, messages, tools, arguments)
    else:
        text = render_continuation(model, messages, tools, arguments, options.continued_path)
    if options.must_fit:
        check_length(model, text)
    tokens = tokenize(model, text, add_special_tokens=False)
    videos = sum(isinstance(each, Video) for each in images)
    get_image_markers(model).check(tokens.ids, len(images) - videos, videos)
    processed = _process_images(model, text, images) if images else None
    found = find_boundaries(model, tokens, messages, tools, arguments)
    if processed is None:
        return RenderedPrompt(text, tokens.ids, boundaries=found)
    found = map_to_expanded(found, tokens.ids, processed.ids, processed.image_spans)
    return RenderedPrompt(
        text, processed.ids, processed.image_spans, processed.media, processed.image_digests, boundaries=found
    )


def _process_images(model: ModelInfo, text: str, images: Sequence[Image | Video]) -> ProcessedPrompt:
    videos = [each for each in images if isinstance(each, Video)]
    stills = [each for each in images if not isinstance(each, Video)]
    try:
        return model.process(text, stills, videos) if videos else model.process(text, stills)
    except MediaError as exc:
        if exc.param is not None:
            raise
        raise MediaError(f"messages: {exc}", param="messages") from exc
    except MlxrunError:
        raise
    except Exception as exc:  # the model's own processor may raise anything
        logger.warning("image processor failed", exc_info=True)
        reason = describe_foreign_error(exc, 200)
        text = f"messages: the model's processor refuses the {'videos' if videos else 'images'}: {reason}"
        raise MediaError(text, param="messages") from exc


def build_raw_prompt(model: ModelInfo, prompt: str | Sequence[int], param: str) -> RenderedPrompt:
    """Builds a prompt of /v1/completions: a text, or token ids as they are."""
    if isinstance(prompt, str):
        check_text(prompt, param, get_image_markers(model))
        check_length(model, prompt, param)
        text, ids = prompt, tokenize(model, prompt, add_special_tokens=True).ids
    else:
        ids = tuple(prompt)
        check_token_ids(model, ids, param)
        text = model.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not ids:
        reject(param, "is empty; give at least one token")
    return RenderedPrompt(text, ids)


def check_token_ids(model: ModelInfo, ids: Sequence[int], param: str) -> None:
    """Refuses ids outside the vocabulary, and those that stand for images."""
    size, media = len(model.tokenizer), set(get_image_markers(model).reserved.values())
    if ids and min(ids) >= 0 and max(ids) < size and media.isdisjoint(ids):
        return
    for i, token in enumerate(ids):
        if not 0 <= token < size:
            reject(f"{param}[{i}]", f"{token} is not a token id; the vocabulary has {size} tokens")
        if token in media:
            reject(
                f"{param}[{i}]", f"{token} is a media token of the model, which a raw prompt cannot contain"
            )
