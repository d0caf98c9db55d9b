"""`truncation: auto`: which items of a conversation are left out of a prompt that does not fit.

Items are dropped from the beginning of the conversation, as OpenAI documents it: as few as necessary, turn by
turn, so that the rest begins with a user's message. If the last turn alone does not fit, its oldest steps
(an assistant's items and the outputs of its calls) are dropped, and the user's message is kept. Instructions,
system and developer messages always stay. Nothing that is stored changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from mlxrun.core.errors import PromptTooLong

Item = dict[str, Any]
Prepared = TypeVar("Prepared")
Self = TypeVar("Self", bound="Truncatable")


class Truncatable(Protocol):
    """A request whose prompt is made of items."""

    @property
    def context(self) -> tuple[Item, ...]: ...
    def keep(self: Self, indices: Sequence[int]) -> Self: ...


async def find_fitting(
    request: Self, prepare: Callable[[Self], Awaitable[Prepared]]
) -> tuple[Self, Prepared]:
    """The request with as few items dropped as necessary, and what `prepare` makes of it.

    `prepare` raises PromptTooLong where the prompt does not fit; so does this if nothing more can be dropped.
    """
    try:
        return request, await prepare(request)
    except PromptTooLong as error:
        too_long = error
    items = request.context
    cuts = list_cuts(items)
    found: tuple[Self, Prepared] | None = None
    low, high = 0, len(cuts)
    while low < high:  # the last cut is tried if no earlier one fits, as it is the middle of what is left
        middle = (low + high) // 2
        shorter = request.keep(list_kept(items, cuts[middle]))
        try:
            found = shorter, await prepare(shorter)
            high = middle
        except PromptTooLong:
            low = middle + 1
    if found is None:
        raise too_long
    return found


def list_cuts(items: Sequence[Item]) -> list[int]:
    """The positions, ascending, before which items may be dropped; each drops more than the one before."""
    first_user, last_user = _find_last_question(items)
    cuts, dropped, at_last_cut = [], 0, 0
    for i, item in enumerate(items):
        begins_turn = i <= first_user and _is_user(item) and not (i and _is_user(items[i - 1]))
        begins_step = i > last_user and not _is_output(item) and i > 0 and _ends_step(items[i - 1])
        if (begins_turn or begins_step) and dropped > at_last_cut:
            cuts.append(i)
            at_last_cut = dropped
        # Outputs do not count, as one may have gone with its call.
        dropped += not (_is_permanent(item) or _is_output(item) or first_user <= i <= last_user)
    return cuts


def list_kept(items: Sequence[Item], cut: int) -> list[int]:
    """The indices of the items that stay. The outputs of dropped calls are dropped too."""
    first_user, last_user = _find_last_question(items)
    stays = [i >= cut or first_user <= i <= last_user or _is_permanent(item) for i, item in enumerate(items)]
    dropped_calls = {
        item["call_id"] for i, item in enumerate(items) if item["type"].endswith("_call") and not stays[i]
    }
    return [
        i
        for i, item in enumerate(items)
        if stays[i] and not (_is_output(item) and item["call_id"] in dropped_calls)
    ]


def _find_last_question(items: Sequence[Item]) -> tuple[int, int]:
    """The first and the last of the user's messages that end the conversation's questions; -1 without any."""
    last = max((i for i, item in enumerate(items) if _is_user(item)), default=-1)
    first = last
    while first > 0 and _is_user(items[first - 1]):
        first -= 1
    return first, last


def _is_user(item: Item) -> bool:
    return bool(item["type"] == "message" and item["role"] == "user")


def _is_permanent(item: Item) -> bool:
    return item.get("role") in ("system", "developer")


def _is_output(item: Item) -> bool:
    return bool(item["type"].endswith("_output"))


def _ends_step(item: Item) -> bool:
    """Whether an assistant's items may begin behind it."""
    return _is_user(item) or _is_output(item)
