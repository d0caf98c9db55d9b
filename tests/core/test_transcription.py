from __future__ import annotations

from mlxrun.core.request import FinishReason, TokenEvent
from mlxrun.core.transcription import Transcript, TranscriptSegment

SEGMENT = TranscriptSegment(0, 0.0, 1.0, " a", (1,), 0.0, None, None, None)


def test_parts_join_in_order() -> None:
    first, second = Transcript("a", "en", (SEGMENT,)), Transcript("b", "", (SEGMENT,))
    assert first.join(second) == Transcript("ab", "en", (SEGMENT, SEGMENT))


def test_unread_events_keep_all_parts() -> None:
    events = [TokenEvent("r", transcript=Transcript(text)) for text in "abc"]
    last = TokenEvent("r", finish=FinishReason.STOP, transcript=Transcript("", "en"))
    merged = events[0].merge_progress(events[1]).merge_progress(events[2]).merge_progress(last)
    assert merged.transcript == Transcript("abc", "en")
    assert merged.finish is FinishReason.STOP
