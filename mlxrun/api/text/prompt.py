"""Turns checked messages or text into prompt tokens. Slow for long texts: call it on a worker thread.

The template writes the special tokens of a chat, the tokenizer those of a raw text. A special token that a
message spells counts as that token, as in every server that renders templates to text. Only tokens that stand
for images or videos are refused, since they would shift all images after them.

Other prompts are likely to diverge from a chat prompt at its cache positions. To find one, the conversation
is rendered with another text in place of one message. The position is the number of tokens that both prompts
share. So it ends a true prefix of another prompt, whatever template and tokenizer do. A poor guess costs a
snapshot, never correctness.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxrun.api.text.continuation import render_continuation
from mlxrun.api.text.media.media_kinds import VIDEO, MediaRef
from mlxrun.api.text.messages import Message
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import ImageMarkers, get_image_markers, render_chat
from mlxrun.api.text.tokens.tokens import (
    PromptTokens,
    check_length,
    count_shared_prefix,
    count_shared_tokens,
    tokenize,
)
from mlxrun.config.media_settings import Audio, Video
from mlxrun.core.errors import MediaError, MlxrunError, RequestError
from mlxrun.core.field_errors import describe_foreign_error, iterate_strings, reject
from mlxrun.core.media_names import KINDS, PLURALS, MediaKind
from mlxrun.core.request import ProcessedPrompt

if TYPE_CHECKING:
    from PIL.Image import Image


logger = logging.getLogger(__name__)

_SURROGATE = re.compile("[\ud800-\udfff]")
MIN_TOKENS = 16  # shorter prefixes are not worth a cache entry
_MAX_VARIANTS = 2  # besides the prompt itself: long conversations are slow to render
_OTHER_TEXTS = ("Zq", "0q")
_COPIED_FIELDS = ("role", "name", "tool_call_id")  # reasoning and calls belong to the content


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text and tokens. `continuation`: the end of the text, if the answer continues it. `offsets`:
    where the tokens begin in the text, in characters; empty if unknown. Request has the other fields."""

    text: str
    ids: tuple[int, ...]
    image_spans: tuple[tuple[int, int], ...] = ()
    media: Any = None
    image_digests: tuple[bytes, ...] = ()
    cache_positions: tuple[int, ...] = ()
    continuation: str = ""
    offsets: tuple[int, ...] = ()
    logprobs_from: int = 1


def check_text(value: Any, param: str, markers: ImageMarkers) -> int:
    """Return the number of characters of all strings in a value. RequestError for a string that cannot be
    tokenized, or that contains a media token."""
    size = 0
    for path, text in iterate_strings(value, param):
        if not text.isascii() and _SURROGATE.search(text):
            reject(path, "contains half of a surrogate pair, which is not Unicode text")
        token = next((token for token in markers.reserved if token in text), None)
        if token is not None:
            reject(path, f"contains the model's media token {token!r}; remove it or spell it differently")
        size += len(text)
    return size


def build_chat_prompt(
    model: ModelInfo,
    messages: Sequence[Message],
    images: Sequence[Image | Video | Audio],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
    *,
    refs: Sequence[MediaRef] = (),
    continued_path: str | None = None,
    must_fit: bool = False,
) -> RenderedPrompt:
    """Render and tokenize a conversation. The model's processor runs only if there are media.

    `images`: all media, in the order of their parts. `refs`: where they are in the body; a PDF is there once
    for each page. `continued_path`: the path of the last message's
    content, if the answer continues it. `must_fit`: a text that is certainly longer than the context raises
    PromptTooLong before it is tokenized. Raises MediaError if the processor refuses the images."""
    if continued_path is None:
        text = render_chat(model, messages, tools, arguments)
    else:
        text = render_continuation(model, messages, tools, arguments, continued_path)
    if must_fit:
        check_length(model, text)
    tokens = tokenize(model, text, add_special_tokens=False)
    sorted_media = sort_media(images)
    sent = {kind: len(media) for kind, media in sorted_media.items() if media}
    get_image_markers(model).check(tokens.ids, sent)
    processed = _process_media(model, text, sorted_media, refs) if images else None
    found = find_cache_positions(model, tokens, messages, tools, arguments)
    if processed is None:
        return RenderedPrompt(text, tokens.ids, cache_positions=found)
    found = map_to_expanded(found, tokens.ids, processed.ids, processed.image_spans)
    return RenderedPrompt(
        text,
        processed.ids,
        processed.image_spans,
        processed.media,
        processed.image_digests,
        cache_positions=found,
    )


def sort_media(media: Sequence[Image | Video | Audio]) -> dict[MediaKind, list[Any]]:
    """Sort the media of a prompt by their kinds, of which each has a list."""
    found: dict[MediaKind, list[Any]] = {kind: [] for kind in KINDS}
    for each in media:
        found["video" if isinstance(each, Video) else "audio" if isinstance(each, Audio) else "image"].append(
            each
        )
    return found


def _process_media(
    model: ModelInfo, text: str, media: Mapping[MediaKind, Sequence[Any]], refs: Sequence[MediaRef]
) -> ProcessedPrompt:
    """The prompt with its media. MediaError names the field of the only one; of several, the processor does
    not say which it refuses."""
    params = {ref.param for ref in refs}
    param = params.pop() if len(params) == 1 else "messages"
    codes = [ref.medium.code for ref in refs] or [MediaError.code]
    code = VIDEO.code if VIDEO.code in codes else codes[0]
    given = [media[kind] for kind in KINDS]
    while not given[-1]:
        given.pop()
    try:
        return model.process(text, *given)
    except MediaError as exc:
        if exc.param is not None:
            raise
        raise MediaError(f"{param}: {exc}", param=param, code=code) from exc
    except MlxrunError:
        raise
    except Exception as exc:  # the model's own processor may raise anything
        logger.warning("processor of media failed", exc_info=True)
        names = " and ".join(PLURALS[kind] for kind in KINDS if media[kind])
        text = f"{param}: the model's processor refuses the {names}: {describe_foreign_error(exc, 200)}"
        raise MediaError(text, param=param, code=code) from exc


def build_raw_prompt(model: ModelInfo, prompt: str | Sequence[int], param: str) -> RenderedPrompt:
    """Build a prompt of /v1/completions from a text or from token ids. RequestError if it is empty."""
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
    """Raise RequestError for ids outside the vocabulary, and for those of media tokens."""
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


def find_cache_positions(
    model: ModelInfo,
    tokens: PromptTokens,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
) -> tuple[int, ...]:
    """Return up to two cache positions in `tokens`, the rendered messages; ascending.

    They are the end of system and tools, and the start of the last user turn. If both are the same, the start
    of the last message comes in."""
    found = set()
    for variant in make_variants(messages):
        try:
            text = render_chat(model, variant, tools, arguments)
        except RequestError:
            logger.debug("no cache position: the chat template rejects the first %d messages", len(variant))
        else:
            found.add(count_shared_tokens(model, tokens, text))
    return tuple(sorted(p for p in found if MIN_TOKENS <= p < len(tokens.ids)))


def make_variants(messages: Sequence[Message]) -> list[list[Message]]:
    """Return variants of a conversation. Each ends with a message that was replaced by another text."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    system = int(messages[0]["role"] == "system")
    ends = list(dict.fromkeys([system, *users[-1:], max(system, len(messages) - 1)]))[:_MAX_VARIANTS]
    return [[*messages[:end], _make_stand_in(messages[end:], user=end == system)] for end in ends]


def _make_stand_in(rest: Sequence[Message], user: bool) -> Message:
    """A message that replaces the first of `rest` and has its shape; `user`: it is a user's in any case."""
    if not rest or (user and rest[0]["role"] != "user"):
        return {"role": "user", "content": _OTHER_TEXTS[0]}
    same = {key: value for key, value in rest[0].items() if key in _COPIED_FIELDS}
    content = rest[0]["content"]
    text = content if isinstance(content, str) else content[0].get("text", "")
    # Its first character differs, also if a template strips white space.
    other = next(each for each in _OTHER_TEXTS if not text.lstrip().startswith(each[0]))
    if isinstance(content, str):
        return {**same, "content": other}
    return {**same, "content": [{"type": "text", "text": other}]}


def map_to_expanded(
    positions: Iterable[int], ids: Sequence[int], expanded: Sequence[int], spans: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Map positions in `ids` to positions in `expanded`. `ids` has one placeholder per image; in `expanded`
    images fill `spans`. Positions within an image, and others without a counterpart, are left out."""
    ranges = list(_find_unchanged_ranges(tuple(ids), tuple(expanded), spans))
    found = {p + shift for p in positions for first, last, shift in ranges if first <= p <= last}
    return tuple(sorted(p for p in found if MIN_TOKENS <= p < len(expanded)))


def _find_unchanged_ranges(
    ids: tuple[int, ...], expanded: tuple[int, ...], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Ranges of `ids`, ends included, each with the shift of its positions: from the start on while images
    replace exactly their placeholders, and from the last image on while both ends are equal.

    Some processors write more than the image, which can even merge with the text beside it.
    """
    at, to = 0, 0
    for start, end in spans:
        same = count_shared_prefix(ids[at:], expanded[to:start])
        yield at, at + same, to - at
        at += same
        if to + same < start or at == len(ids) or ids[at] != expanded[start]:
            break
        while at < len(ids) and ids[at] == expanded[start]:
            at += 1
        to = end
    else:
        same = count_shared_prefix(ids[at:], expanded[to:])
        yield at, at + same, to - at
        at += same
    after = expanded[spans[-1][1] :] if spans else expanded
    same = count_shared_prefix(ids[::-1], after[::-1])
    yield max(at + 1, len(ids) - same), len(ids), len(expanded) - len(ids)
