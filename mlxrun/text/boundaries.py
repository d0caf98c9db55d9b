"""Where in a chat prompt other prompts are likely to part from it: positions in its token ids.

Found by rendering the conversation with another text in place of one message and taking the tokens that both
have in common, so each is a true prefix of another prompt, whatever a template does to its messages and
however a tokenizer merges across their borders. A poor guess costs a saved state, never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlxrun.errors import RequestError
from mlxrun.text.messages import Message
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import render
from mlxrun.text.tokens import PromptTokens, shared, shared_tokens

logger = logging.getLogger(__name__)

LEAST = 16  # tokens that are worth a record
_VARIANTS = 2  # besides the prompt itself: long conversations take their time to render
_OTHERS = ("Zq", "0q")
_KEPT = ("role", "name", "tool_call_id")  # reasoning and calls are what the message says


def boundaries(
    host: ModelInfo,
    tokens: PromptTokens,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
) -> tuple[int, ...]:
    """Positions in `tokens`, the rendered messages, ascending: the end of system and tools, the start of the
    last user turn, and of the last message if only one of these is elsewhere."""
    found = set()
    for variant in variants(messages):
        try:
            text = render(host, variant, tools, arguments)
        except RequestError:
            logger.debug("no boundary: the chat template refuses %d messages of the chat", len(variant))
        else:
            found.add(shared_tokens(host, tokens, text))
    return tuple(sorted(p for p in found if LEAST <= p < len(tokens.ids)))


def variants(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation cut before a message that says something else: no two before the same one."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    system = int(messages[0]["role"] == "system")
    ends = list(dict.fromkeys([system, *users[-1:], max(system, len(messages) - 1)]))[:_VARIANTS]
    return [[*messages[:end], _stand_in(messages[end:], user=end == system)] for end in ends]


def _stand_in(rest: Sequence[Message], user: bool) -> Message:
    """A message in place of the first of `rest`, of its shape; `user`: of a user in any case."""
    if not rest or (user and rest[0]["role"] != "user"):
        return {"role": "user", "content": _OTHERS[0]}
    same = {key: value for key, value in rest[0].items() if key in _KEPT}
    content = rest[0]["content"]
    if isinstance(content, str):
        return {**same, "content": _other(content)}
    return {**same, "content": [{"type": "text", "text": _other(content[0].get("text", ""))}]}


def _other(text: str) -> str:
    """A text that begins otherwise, also where a template strips it."""
    return next(other for other in _OTHERS if not text.lstrip().startswith(other[0]))


def expand(
    positions: Iterable[int], ids: Sequence[int], expanded: Sequence[int], spans: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Where positions in `ids`, which has a mark for each image, are in `expanded`, where images fill
    `spans`. Those that are within an image, or that cannot be told, are left out."""
    pieces = list(_pieces(tuple(ids), tuple(expanded), spans))
    found = {p + shift for p in positions for first, last, shift in pieces if first <= p <= last}
    return tuple(sorted(p for p in found if LEAST <= p < len(expanded)))


def _pieces(
    ids: tuple[int, ...], expanded: tuple[int, ...], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Ranges of `ids`, ends included, and what to add to a position in them: from the start on as long as
    images fill the place of their marks, and from the last image on as long as the ends are alike.

    Some processors write more than the image there, which can even merge with the text beside it.
    """
    at, to = 0, 0
    for start, end in spans:
        alike = shared(ids[at:], expanded[to:start])
        yield at, at + alike, to - at
        at += alike
        if to + alike < start or at == len(ids) or ids[at] != expanded[start]:
            break
        while at < len(ids) and ids[at] == expanded[start]:
            at += 1
        to = end
    else:
        alike = shared(ids[at:], expanded[to:])
        yield at, at + alike, to - at
        at += alike
    after = expanded[spans[-1][1] :] if spans else expanded
    alike = shared(ids[::-1], after[::-1])
    yield max(at + 1, len(ids) - alike), len(ids), len(expanded) - len(ids)
