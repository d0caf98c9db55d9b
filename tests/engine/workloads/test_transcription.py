from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.config.settings import Config, EngineSettings, ModelSettings
from mlxrun.core.errors import EngineDead, InternalError, Overloaded, RequestError
from mlxrun.core.request import FinishReason, Request, SamplingParams, TokenEvent
from mlxrun.core.transcription import Recording, Transcript, TranscriptSegment
from mlxrun.engine.build import build_engine
from mlxrun.engine.workloads.transcription import TranscriptionSteps
from tests.helpers.whisper_models import make_speech, write_whisper


@dataclass
class FakeState:
    name: Any
    left: int

    @property
    def done(self) -> bool:
        return not self.left


class FakeRunner:
    """A recording's samples are its name and how many tries it takes; tries of "bad" raise. `dead`: also a
    trial does."""

    def __init__(self, dead: bool = False) -> None:
        self.dead = dead
        self.trials = 0
        self.tries: list[str] = []
        self.closed = False

    def start(self, recording: Recording) -> FakeState:
        return FakeState(*recording.samples)

    def advance(self, state: FakeState) -> Transcript:
        self.tries.append(state.name)
        if state.name == "bad":
            raise ArithmeticError("no")
        state.left -= 1
        segment = TranscriptSegment(0, 0.0, 1.0, state.name, (7, 8), 0.0, None, None, None)
        return Transcript(f"{state.name}{state.left}", "en", (segment,))

    def compute_trial(self) -> None:
        self.trials += 1
        if self.dead:
            raise ArithmeticError("no")

    def close(self) -> None:
        self.closed = True


def make(max_queue: int = 9, max_errors: int = 2, dead: bool = False) -> TranscriptionSteps:
    return TranscriptionSteps(FakeRunner(dead), max_queue, max_errors)  # type: ignore[arg-type]


def add(steps: TranscriptionSteps, name: str, tries: int, background: bool = False) -> None:
    recording = Recording((name, tries))
    steps.add(Request(name, (), SamplingParams(), recording=recording, background=background))


def run(steps: TranscriptionSteps) -> list[TokenEvent]:
    events = []
    while steps.is_busy:
        events += steps.step()
    return events


def test_a_short_recording_does_not_wait_for_a_long_one() -> None:
    steps = make()
    add(steps, "long", 5)
    for _ in range(3):
        steps.step()
    add(steps, "short", 2)
    assert steps.count() == {"running": 1, "waiting": 1, "finished": 0}
    events = run(steps)
    assert steps.runner.tries == ["long", "long", "short", "short", "long", "long", "long"]  # type: ignore[attr-defined]
    assert [event.request_id for event in events if event.finish] == ["short", "long"]
    assert steps.count()["finished"] == 2


def test_each_part_is_an_event_with_its_tokens() -> None:
    steps = make()
    add(steps, "one", 2)
    events = run(steps)
    assert [event.transcript.text for event in events] == ["one1", "one0"]
    assert [event.finish for event in events] == [None, FinishReason.STOP]
    assert {event.tokens for event in events} == {(7, 8)}


def test_clients_go_before_the_background() -> None:
    steps = make()
    add(steps, "batch", 2, background=True)
    add(steps, "client", 3)
    assert [event.request_id for event in run(steps) if event.finish] == ["client", "batch"]


def test_an_aborted_recording_is_not_computed_any_more() -> None:
    steps = make()
    add(steps, "gone", 5)
    steps.step()
    assert steps.abort("gone") == TokenEvent("gone", finish=FinishReason.ABORT)
    assert not steps.is_busy
    assert steps.abort("gone") is None
    assert not steps.has("gone")


def test_a_full_queue_refuses() -> None:
    steps = make(max_queue=1)
    add(steps, "a", 1)
    with pytest.raises(Overloaded, match=r"1 recordings wait \(scheduler.max_queue\)"):
        add(steps, "b", 1)
    add(steps, "c", 1, background=True)


def test_a_failure_is_of_its_recording_alone() -> None:
    steps = make()
    add(steps, "bad", 1)
    add(steps, "good", 1)
    events = {event.request_id: event for event in run(steps) if event.finish}
    assert events["good"].finish is FinishReason.STOP
    assert isinstance(events["bad"].error, InternalError)


def test_recordings_that_fail_do_not_stop_the_engine() -> None:
    steps = make(max_errors=2)
    for _ in range(5):
        add(steps, "bad", 1)
        (event,) = run(steps)
        assert event.finish is FinishReason.ERROR
    assert steps.runner.trials == 2  # type: ignore[attr-defined]


def test_failures_between_which_a_recording_is_transcribed_are_no_streak() -> None:
    steps = make(max_errors=2)
    for name in ("bad", "good") * 3:
        add(steps, name, 1)
        run(steps)
    assert steps.runner.trials == 0  # type: ignore[attr-defined]


def test_a_device_that_is_gone_stops_the_engine() -> None:
    steps = make(max_errors=2, dead=True)
    add(steps, "bad", 1)
    run(steps)
    add(steps, "bad", 1)
    with pytest.raises(EngineDead, match="2 recordings failed in a row: no"):
        run(steps)


def test_a_whisper_is_an_engine_that_only_transcribes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "clear_streams", lambda: None)  # other tests need those of this thread
    folder = write_whisper(tmp_path / "tiny")
    config = Config(model=ModelSettings(path=str(folder)), engine=EngineSettings(device="cpu"))
    engine = build_engine(config)
    try:
        samples = make_speech(1)
        engine.add(Request("a", (), SamplingParams(), recording=Recording(samples)))
        events = []
        while engine.busy:
            events += engine.step()
        assert events[-1].finish is FinishReason.STOP
        assert any(event.transcript.text for event in events)
        with pytest.raises(RequestError, match="no embeddings, scores or transcripts"):
            engine.add(Request("b", (1,), SamplingParams(), pooled=True))
    finally:
        engine.close()
