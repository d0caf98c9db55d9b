"""Sparse prefill: rows with gaps give what the library gives for the same tokens at the same positions.

The oracle computes runs of consecutive tokens one after the other, with caches whose offset is a position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.config.settings import PrefillSettings, SpeculationSettings
from mlxrun.core.errors import ConfigError, RequestError
from mlxrun.core.request import FinishReason, Request
from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache.tracked_request import TrackedRequest
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.prompt_inputs import PromptInputs, place_tokens
from mlxrun.model.sparse import explicit_positions
from mlxrun.model.sparse.explicit_positions import PositionedRope, make_placed_caches, place_caches
from mlxrun.model.sparse.prompt_selector import PromptSelector
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo
from tests.helpers.oracle import Answer

Patch = pytest.MonkeyPatch
LONG, OTHER, SHORT = text_models.prompts(11, (300, 270, 9))
COUNT = 12
KEEP = 0.6


def make_engine(zoo: Zoo, family: str = "llama", keep: float = KEEP, **options: Any) -> Engine:
    prefill = PrefillSettings("draft", keep, 256)
    return engine_driver.make_real_engine(
        zoo.text(family), draft=str(zoo.text("qwen3")), prefill=prefill, **options
    )


def list_asks() -> list[TimedRequest]:
    """Two long prompts, and a short one that joins while they decode."""
    given = zip("abc", (LONG, OTHER, SHORT), (0, 2, 4), strict=True)
    return [
        TimedRequest(engine_driver.make_text_request(name, prompt, max_tokens=COUNT), at)
        for name, prompt, at in given
    ]


def compute_with_gaps(folder: Path, prompt: Sequence[int], positions: Sequence[int]) -> Answer:
    """ORACLE of the tokens of a prompt at these positions."""
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    model, _ = load(str(folder))
    caches = make_placed_caches(make_prompt_cache(model))

    def call(ids: Sequence[int], position: int) -> mx.array:
        place_caches(caches, position)
        logits: mx.array = model(mx.array([list(ids)]), cache=caches)[0, -1]
        mx.eval(logits)
        return logits - mx.logsumexp(logits)

    last = len(positions) - 1
    ends = sorted({last, *(i + 1 for i in range(last) if positions[i + 1] != positions[i] + 1)})
    for first, end in zip([0, *ends], ends, strict=False):
        call([prompt[at] for at in positions[first:end]], positions[first])
    token, rows, tokens = prompt[-1], [], []
    for step in range(COUNT):
        rows.append(np.array(call([token], len(prompt) - 1 + step)))
        token = int(rows[-1].argmax())
        tokens.append(token)
    return Answer(tuple(prompt), tuple(tokens), np.array(rows))


@pytest.fixture(scope="module")
def answer(zoo: Zoo) -> Callable[..., Answer]:
    def compute(family: str, prompt: tuple[int, ...], positions: tuple[int, ...]) -> Answer:
        return compute_with_gaps(zoo.text(family), prompt, positions)

    return functools.cache(compute)


def check_asks(
    zoo: Zoo,
    answer: Callable[..., Answer],
    family: str,
    engine: Engine,
    asks: Sequence[TimedRequest],
    **run: Any,
) -> None:
    """Run them, and compare those with gaps with the oracle, and the others with the plain one."""
    events = engine_driver.run_requests(engine, asks, **run)
    assert engine.selection is not None
    for ask in asks:
        event, prompt = events[ask.id], ask.request.prompt
        positions = engine.selection._chosen.get(prompt)
        known = zoo.answer(family, prompt, COUNT) if positions is None else answer(family, prompt, positions)
        assert event.num_left_out == (0 if positions is None else len(prompt) - len(positions))
        engine_driver.check_answer(event, known)


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("qwen3", "deepseek_v3", "phi3"))],
)
def test_a_prompt_of_which_all_is_kept(zoo: Zoo, family: str) -> None:
    engine = make_engine(zoo, family, keep=1.0)
    events = engine_driver.run_requests(engine, list_asks()[:1])
    assert engine.selection is not None and engine.selection.counts.prompts == 1
    engine_driver.check_answer(events["a"], zoo.answer(family, LONG, COUNT))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", None),
        ("llama", "compiled"),
        ("llama", "paged"),
        ("llama", "grouped"),
        ("llama", "row_by_row"),
        ("gemma2", None),
        ("qwen3_next", None),
        ("qwen3_next", "paged"),
        *(pytest.param(name, None, marks=pytest.mark.sweep) for name in ("nemotron_h", "lfm2", "falcon_h1")),
    ],
)
def test_rows_with_gaps_among_others(
    zoo: Zoo, answer: Callable[..., Answer], family: str, method: Any
) -> None:
    engine = make_engine(zoo, family, methods=method and ComputeMethods(method))
    check_asks(zoo, answer, family, engine, list_asks())
    assert engine.selection is not None
    assert 100 < engine.selection.counts.left_out < 0.5 * engine.selection.counts.tokens


def preempt_once(engine: Engine) -> Callable[[int], None]:
    """Preempt the first row once it has a few tokens."""
    done: list[str] = []

    def each(step: int) -> None:
        rows = [s for s in engine.scheduler.requests if s.decoding and len(s.output) > 4]
        if rows and not done:
            engine.scheduler.preempt(rows[0])
            done.append(rows[0].id)

    return each


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_preempted_row(zoo: Zoo, answer: Callable[..., Answer], family: str) -> None:
    """Its answer so far is computed again, behind the whole prompt."""
    engine = make_engine(zoo, family)
    check_asks(zoo, answer, family, engine, list_asks()[:1], each=preempt_once(engine))


def test_a_draft_with_recurrent_states(zoo: Zoo, answer: Callable[..., Answer]) -> None:
    """Its attention layers score, and its states see each token once."""
    options = {"draft": str(zoo.text("qwen3_next")), "prefill": PrefillSettings("draft", KEEP, 256)}
    engine = engine_driver.make_real_engine(zoo.text("llama"), **options)
    check_asks(zoo, answer, "llama", engine, list_asks())
    assert engine.selection is not None and engine.selection.counts.prompts == 2
    caller = engine.selection.selector._caller
    scores = [PromptSelector(caller, KEEP, 4096).weigh(LONG, limit) for limit in (64, 300)]
    assert np.allclose(*scores, rtol=1e-3) and scores[0].max() > 0


def test_a_prompt_that_is_aborted_while_it_is_read(zoo: Zoo, answer: Callable[..., Answer]) -> None:
    """What another request of that id asks for is read from its beginning."""
    engine, (ask, *_) = make_engine(zoo), list_asks()
    engine.add(ask.request)
    engine.step()
    engine.abort(ask.id)
    final = [event for event in engine.step() if event.finish is not None]
    assert [event.finish for event in final] == [FinishReason.ABORT] and not engine.busy
    other = engine_driver.make_text_request(ask.id, OTHER, max_tokens=COUNT)
    check_asks(zoo, answer, "llama", engine, [TimedRequest(other)])


def test_rows_with_gaps_draft(zoo: Zoo, answer: Callable[..., Answer]) -> None:
    """Drafted tokens are behind the whole prompt too."""
    speculation = SpeculationSettings("ngram", max_tokens=4, min_ngram=1)
    engine = make_engine(zoo, methods=ComputeMethods("paged"), speculation=speculation)
    check_asks(zoo, answer, "llama", engine, list_asks()[:1])
    assert engine.scheduler.drafts.counts.drafted > 0


def test_an_id_twice(zoo: Zoo) -> None:
    engine, (ask, _, short) = make_engine(zoo), list_asks()
    engine.add(ask.request)
    for request in (ask.request, replace(short.request, id=ask.id)):
        with pytest.raises(RequestError, match="'a' is already running"):
            engine.add(request)
    engine.abort(ask.id)
    engine.add(replace(short.request, id=ask.id))


def test_a_continued_answer(zoo: Zoo, answer: Callable[..., Answer]) -> None:
    engine, (ask, *_) = make_engine(zoo), list_asks()
    first = engine_driver.run_requests(engine, [ask])[ask.id].tokens
    request = replace(ask.request, id="again", prior_output=first[:5])
    again = engine_driver.run_requests(make_engine(zoo), [request])["again"]
    assert again.tokens == first[5:]


def ignore_positions_of_prompts(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "mlxrun.model.run.runner.place_tokens",
        lambda p: replace(place_tokens(p), positions=mx.arange(len(p))),
    )


def decode_behind_the_kept_tokens(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "mlxrun.model.run.runner.place_tokens", lambda p: replace(place_tokens(p), position_delta=0)
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("plant", [ignore_positions_of_prompts, decode_behind_the_kept_tokens])
def test_wrong_positions_are_found(
    zoo: Zoo, answer: Callable[..., Answer], monkeypatch: Patch, plant: Callable[[Patch], None], family: str
) -> None:
    engine = make_engine(zoo, family)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="logprobs|is not"):
        check_asks(zoo, answer, family, engine, list_asks()[:1])


def test_a_preempted_answer_at_wrong_positions_is_found(
    zoo: Zoo, answer: Callable[..., Answer], monkeypatch: Patch
) -> None:
    engine = make_engine(zoo)

    class Forgetful(explicit_positions.PositionedModelCaller):
        def prefill(self, ids: mx.array, cache: Any, start: int, inputs: PromptInputs) -> Any:
            if start:
                inputs = replace(inputs, position_delta=0)
            return super().prefill(ids, cache, start, inputs)

    engine_driver.get_runner(engine)._caller.__class__ = Forgetful
    with pytest.raises(AssertionError, match="logprobs|is not"):
        check_asks(zoo, answer, "llama", engine, list_asks()[:1], each=preempt_once(engine))


def test_positions_of_another_engine_are_not_taken(zoo: Zoo) -> None:
    """Two engines of one process compute at the same time."""
    make, asks = functools.partial(make_engine, zoo, load_check=False), list_asks()
    (alone,) = engine_driver.run_at_once([make], asks)
    for events in engine_driver.run_at_once([make, make], asks):
        for name, event in events.items():
            assert event.tokens == alone[name].tokens, event
            found, known = map(engine_driver.list_logprobs, (event, alone[name]))
            assert np.abs(found - known).max() < 1e-4


# -- the prefix cache ---------------------------------------------------------------------------------


def ask_for_the_kept_tokens(zoo: Zoo, family: str) -> tuple[Request, Any]:
    """A plain request whose prompt is what was kept of an earlier one, and its event."""
    engine = make_engine(zoo, family)
    engine_driver.run_requests(engine, list_asks()[:1])
    assert engine.selection is not None
    kept = [LONG[at] for at in engine.selection._chosen[tuple(LONG)]]
    request = engine_driver.make_text_request("kept", kept, max_tokens=COUNT)
    return request, engine_driver.run_requests(engine, [replace(request, sparse=False)])["kept"]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_rows_with_gaps_are_not_cached(zoo: Zoo, family: str) -> None:
    request, event = ask_for_the_kept_tokens(zoo, family)
    assert event.num_cached_tokens == 0
    engine_driver.check_answer(event, zoo.answer(family, request.prompt, COUNT))


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_cached_rows_with_gaps_are_found(zoo: Zoo, monkeypatch: Patch, family: str) -> None:
    monkeypatch.setattr(TrackedRequest, "storable", True)
    request, event = ask_for_the_kept_tokens(zoo, family)
    assert event.num_cached_tokens > 0
    assert engine_driver.has_other_answer(event, zoo.answer(family, request.prompt, COUNT))


def test_a_cached_prompt_is_computed_whole(zoo: Zoo) -> None:
    engine, request = make_engine(zoo), list_asks()[0].request
    engine_driver.run_requests(engine, [replace(request, sparse=False)])
    event = engine_driver.run_requests(engine, [replace(request, id="again")])["again"]
    assert event.num_left_out == 0 < event.num_cached_tokens
    engine_driver.check_answer(event, zoo.answer("llama", LONG, COUNT))


def ask_behind_a_cached_prefix(zoo: Zoo, family: str) -> tuple[Engine, Any]:
    """A long prompt whose first tokens another request has computed, and its event."""
    prompt = (*LONG, *OTHER, *LONG)
    engine = make_engine(zoo, family, keep=0.5)
    before = engine_driver.make_text_request("before", prompt[:300], max_tokens=1)
    engine_driver.run_requests(engine, [replace(before, sparse=False)])
    ask = engine_driver.make_text_request("a", prompt, max_tokens=COUNT)
    return engine, engine_driver.run_requests(engine, [ask])["a"]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_cached_prefix_is_used_whole_and_tokens_behind_it_are_left_out(
    zoo: Zoo, answer: Callable[..., Answer], family: str
) -> None:
    engine, event = ask_behind_a_cached_prefix(zoo, family)
    assert engine.selection is not None
    ((prompt, positions),) = engine.selection._chosen.items()
    assert event.num_cached_tokens == 300 and event.num_left_out > 200
    assert positions[:300] == tuple(range(300))
    engine_driver.check_answer(event, answer(family, prompt, positions))


def test_a_hit_beyond_the_first_gap_is_found(
    zoo: Zoo, answer: Callable[..., Answer], monkeypatch: Patch
) -> None:
    """What is behind the gap would be restored from the same tokens at other positions."""
    engine = make_engine(zoo)
    engine_driver.run_requests(engine, list_asks()[:1])
    assert engine.selection is not None
    (positions,) = engine.selection._chosen.values()
    kept = [LONG[at] for at in positions]
    plain = replace(engine_driver.make_text_request("kept", kept, max_tokens=1), sparse=False)
    engine_driver.run_requests(engine, [plain])
    check_asks(zoo, answer, "llama", engine, [replace_id(list_asks()[0], "b")])
    monkeypatch.setattr(TrackedRequest, "num_before_gaps", len(kept))
    with pytest.raises(AssertionError, match="logprobs|is not"):
        check_asks(zoo, answer, "llama", engine, [replace_id(list_asks()[0], "c")])


def replace_id(ask: TimedRequest, name: str) -> TimedRequest:
    return replace(ask, request=replace(ask.request, id=name))


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma3_text", "it has sliding windows"),
        ("mamba2", "it has no attention"),
        ("gpt_bigcode", "its tokens cannot be computed at given positions: logits differ"),
    ],
)
def test_models_that_cannot(zoo: Zoo, family: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"prefill.sparse: is not possible for this model: {why}"):
        make_engine(zoo, family)


def test_a_model_whose_ropes_ignore_positions_is_found_at_load(zoo: Zoo, monkeypatch: Patch) -> None:
    monkeypatch.setattr(PositionedRope, "__call__", lambda self, x, *args, **kw: self.rope(x, *args, **kw))
    with pytest.raises(ConfigError, match="logits differ by"):
        make_engine(zoo)


@pytest.mark.parametrize(
    ("family", "why"), [("gemma3_text", "has sliding windows"), ("gemma2", "cannot weigh")]
)
def test_drafts_that_cannot(zoo: Zoo, family: str, why: str) -> None:
    options: dict[str, Any] = {"draft": str(zoo.text(family)), "prefill": PrefillSettings("draft", KEEP, 256)}
    with pytest.raises(ConfigError, match=rf"model.draft: \S+ {why}"):
        engine_driver.make_real_engine(zoo.text("llama"), **options)


def test_a_draft_with_another_vocabulary(zoo: Zoo) -> None:
    options: dict[str, Any] = {"draft": "embedded", "prefill": PrefillSettings("draft", KEEP, 256)}
    with pytest.raises(
        ConfigError, match=r"model.draft: \S+ has another vocabulary: \d+ tokens differ, such as"
    ):
        engine_driver.make_real_engine(zoo.text("llama"), **options)


def test_a_draft_that_does_not_fit(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match=r"scheduler.memory_limit: .* of the weights are model.draft with"):
        make_engine(zoo, memory_limit=1_000_000)


def test_a_vision_model(zoo: Zoo) -> None:
    prefill = PrefillSettings("draft", KEEP, 256)
    with pytest.raises(ConfigError, match="it is a vision-language model"):
        folder = zoo.vision("qwen2_5_vl")
        engine_driver.make_real_engine(folder, draft=str(zoo.text("llama")), prefill=prefill)


def test_a_draft_that_fails_leaves_the_prompt_whole(zoo: Zoo, monkeypatch: Patch) -> None:
    engine = make_engine(zoo)
    monkeypatch.setattr(PromptSelector, "advance", lambda self, limit: 1 / 0)
    event = engine_driver.run_requests(engine, list_asks()[:1])["a"]
    assert event.num_left_out == 0
    engine_driver.check_answer(event, zoo.answer("llama", LONG, COUNT))
