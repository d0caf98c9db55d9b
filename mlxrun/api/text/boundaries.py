"""Finds the positions in a chat prompt's tokens at which other prompts are likely to diverge from it.

Renders the conversation with another text in place of one message and counts the tokens that both share. So
each position ends a true prefix of another prompt, whatever the template does to its messages and however the
tokenizer merges across their borders. A poor guess costs a saved state, never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlxrun.api.text.messages import Message
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import render_chat
from mlxrun.api.text.tokens.tokens import PromptTokens, count_shared_prefix, count_shared_tokens
from mlxrun.core.errors import RequestError

logger = logging.getLogger(__name__)

MIN_TOKENS = 16  # shorter prefixes are not worth a cache entry
_MAX_VARIANTS = 2  # besides the prompt itself: long conversations are slow to render
_OTHER_TEXTS = ("Zq", "0q")
_COPIED_FIELDS = ("role", "name", "tool_call_id")  # reasoning and calls belong to the content


def find_boundaries(
    model: ModelInfo,
    tokens: PromptTokens,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
) -> tuple[int, ...]:
    """Positions in `tokens`, the rendered messages, ascending: the end of system and tools, the start of the
    last user turn, and the start of the last message if two of the three coincide."""
    found = set()
    for variant in make_variants(messages):
        try:
            text = render_chat(model, variant, tools, arguments)
        except RequestError:
            logger.debug("no boundary: the chat template rejects the first %d messages", len(variant))
        else:
            found.add(count_shared_tokens(model, tokens, text))
    return tuple(sorted(p for p in found if MIN_TOKENS <= p < len(tokens.ids)))


def make_variants(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation up to a message that is replaced by another; each variant replaces another message."""
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
    if isinstance(content, str):
        return {**same, "content": _choose_other_text(content)}
    return {**same, "content": [{"type": "text", "text": _choose_other_text(content[0].get("text", ""))}]}


def _choose_other_text(text: str) -> str:
    """A text with another first character, also if a template strips white space."""
    return next(other for other in _OTHER_TEXTS if not text.lstrip().startswith(other[0]))


def map_to_expanded(
    positions: Iterable[int], ids: Sequence[int], expanded: Sequence[int], spans: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Maps positions in `ids`, which has one placeholder per image, to positions in `expanded`, where images
    fill `spans`. Positions within an image, and those that cannot be mapped, are left out."""
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
