"""A draft model changes no answer, and what it has taken in is never stale.

The target itself as the draft model predicts every token, whatever the settings of a row, in any company: so
a prediction that differs from the answer shows a draft cache that holds other tokens than the row, or another
noise. Some predictions are replaced by wrong ones while they are made, so that there is much to take back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlxrun.config.settings import PrefillSettings, SpeculationSettings
from mlxrun.core.draft_source import KnownRow
from mlxrun.core.errors import ConfigError
from mlxrun.core.request import FinishReason, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.row_drafter import Acceptance
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.load.footprint import count_weight_bytes
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.sampler import RowSampling, SampledBatch, Sampler
from mlxrun.model.speculation import build, draft_model
from mlxrun.model.speculation.draft_model import DraftModel
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo
from tests.parity.test_speculation import EveryOtherToken

Patch = pytest.MonkeyPatch
ROWS = 20
COUNT = 32  # tokens of an answer with much to take back
PLAIN: dict[tuple[str, str], dict[str, TokenEvent]] = {}  # answers without drafts
WRONG = 2  # a token that these models hardly ever sample
PROMPTS = text_models.prompts(7, (3, 9, 70, 40))
JOINS = (0, 3, 0, 5)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 1.5, "temperature": 0.9, "seed": 5},
    {"min_tokens": 6, "logprobs": 3},
)


@pytest.fixture(autouse=True)
def fixed_cost(monkeypatch: Patch) -> None:
    """Drafting a token costs a tenth of a step, which is worth drafting as much as may be."""

    def time_step(caller: Any, methods: ComputeMethods, *count: int) -> float:
        return 1.0 if methods.fixed_width else 0.1

    monkeypatch.setattr(build, "time_step", time_step)
    monkeypatch.setattr(draft_model, "MAX_READ", 24)


def make_engine(zoo: Zoo, small: Path | None, family: str = "llama", **options: Any) -> Engine:
    plain = ComputeMethods("paged", fixed_width=ROWS)
    methods = replace(plain, decode="compiled", launch_first=True) if family == "gemma3_text" else plain
    given = {"speculation": SpeculationSettings("draft" if small else "off", max_tokens=5)} | options
    return engine_driver.make_real_engine(
        zoo.text(family), methods, max_running=ROWS, **{"draft": small and str(small)} | given
    )


def list_asks(count: int = 20) -> list[TimedRequest]:
    """Greedy, sampled, with penalties, and one that may not end yet; some come late."""
    given = [{"max_tokens": count, "logprobs": 1} | s for s in SETTINGS]
    asks = [engine_driver.make_text_request(str(i), p, **given[i]) for i, p in enumerate(PROMPTS)]
    return [TimedRequest(ask, at) for ask, at in zip(asks, JOINS, strict=True)]


@dataclass
class Recorder:
    """What a draft model proposed: the row, its known tokens and the draft."""

    proposals: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)

    def watch(self, monkeypatch: Patch) -> Recorder:
        original = DraftModel.propose

        def propose(
            own: DraftModel, rows: Sequence[KnownRow], limits: Sequence[int]
        ) -> Sequence[tuple[int, ...]]:
            found = original(own, rows, limits)
            pairs = zip(rows, found, strict=True)
            self.proposals += [(row.id, len(row.output), draft) for row, draft in pairs]
            return found

        monkeypatch.setattr(DraftModel, "propose", propose)
        return self

    def count_stale(self, answers: dict[str, TokenEvent]) -> int:
        """Drafts with a token that is neither that of the answer nor behind a planted one."""
        stale = 0
        for rid, start, draft in self.proposals:
            tokens = answers[rid].tokens[start:]
            size = draft.index(WRONG) if WRONG in draft else len(draft)
            stale += draft[:size] != tokens[:size][: len(draft[:size])] and size <= len(tokens)
        return stale


def plant_errors(monkeypatch: Patch, every: int = 5) -> None:
    """Every so many predictions, all rows predict WRONG, and go on from there."""
    calls, original = [0], draft_model.fit_width

    def fit(logits: mx.array, vocab: int) -> mx.array:
        calls[0] += 1
        fitted = original(logits, vocab)
        return fitted if calls[0] % every else mx.where(mx.arange(vocab) == WRONG, 1e9, fitted)

    monkeypatch.setattr(draft_model, "fit_width", fit)


def skip_steps(monkeypatch: Patch) -> None:
    """Now and then a row takes a step or two without a draft."""
    original = DraftModel.is_ready
    monkeypatch.setattr(
        DraftModel, "is_ready", lambda self, row: row.num_tokens % 5 > 0 and original(self, row)
    )


def is_same(first: TokenEvent, second: TokenEvent) -> bool:
    return (
        first.tokens == second.tokens
        and first.finish is second.finish
        and first.stop_id == second.stop_id
        and all(
            abs(a.logprob - b.logprob) < 1e-4 for a, b in zip(first.logprobs, second.logprobs, strict=True)
        )
    )


def preempt_some(engine: Engine) -> Callable[[int], None]:
    """After a step, a row loses its place; three times in all."""
    preempted: list[str] = []

    def preempt(step: int) -> None:
        rows = [s for s in engine.scheduler.requests if s.decoding and not s.num_in_flight and s.output]
        if rows and len(preempted) < 3 and step % 4 == 0:
            engine.scheduler.preempt(rows[-1])
            preempted.append(rows[-1].id)

    return preempt


def run_twice(
    zoo: Zoo, monkeypatch: Patch, family: str, draft: Path, asks: Sequence[TimedRequest], preempts: bool
) -> tuple[bool, int, Engine]:
    """Whether all answers are those without drafts; how many drafts were stale; and the engine."""
    key = family, repr(asks)
    if key not in PLAIN:
        PLAIN[key] = engine_driver.run_requests(make_engine(zoo, None, family), asks)
    without = PLAIN[key]
    recorder = Recorder().watch(monkeypatch)
    engine = make_engine(zoo, draft, family)
    found = engine_driver.run_requests(engine, asks, preempt_some(engine) if preempts else lambda step: None)
    same = all(
        is_same(found[ask.id], without[ask.id])
        for ask in asks
        if found[ask.id].finish is not FinishReason.ABORT
    )
    return same, recorder.count_stale(without), engine


def run_situations(zoo: Zoo, monkeypatch: Patch, family: str) -> tuple[bool, int, Engine]:
    """Rows that join late, are preempted, are aborted and end at a stop token; with drafts that fail."""
    plant_errors(monkeypatch)
    skip_steps(monkeypatch)
    asks = list_asks(COUNT)
    first = asks[0].request
    stop = zoo.answer(family, PROMPTS[0], COUNT).tokens[11]
    ends = replace(first, id="ends", params=replace(first.params, stop_ids=frozenset({stop})))
    aborted = [TimedRequest(replace(first, id=f"aborted {i}"), i, i + 9) for i in (0, 4)]
    return run_twice(
        zoo, monkeypatch, family, zoo.text(family), [*asks, TimedRequest(ends), *aborted], preempts=True
    )


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_no_answer_changes_and_no_draft_is_stale(zoo: Zoo, monkeypatch: Patch, family: str) -> None:
    same, stale, engine = run_situations(zoo, monkeypatch, family)
    counts = engine.scheduler.drafts.counts
    assert counts.drafted > counts.accepted > 60, "too little was drafted to prove anything"
    assert engine.generation.errors == 0 and engine.scheduler.drafts.describe()["problem"] is None
    assert same and stale == 0
    assert engine.scheduler.drafts.source._source._rows == {}  # type: ignore[union-attr]


def keep_rejected(monkeypatch: Patch) -> None:
    """The draft model's rows keep what was rejected."""
    original = PagedDecodeBatch.accept

    def accept(self: PagedDecodeBatch, lengths: Any) -> None:
        if self._width:
            original(self, lengths)

    monkeypatch.setattr(PagedDecodeBatch, "accept", accept)


def believe_all(monkeypatch: Patch) -> None:
    """All drafted tokens count as accepted."""
    original = DraftModel.take_back

    def take_back(self: DraftModel, row: KnownRow) -> list[int]:
        own = self._rows[row.id]
        own.drafted = row.list_tokens(own.known)[: len(own.drafted)]
        return original(self, row)

    monkeypatch.setattr(DraftModel, "take_back", take_back)


def count_drafted(monkeypatch: Patch) -> None:
    """Penalties count drafted tokens that were not accepted."""

    def fork(self: RowSampling, tokens: Sequence[int]) -> RowSampling:
        return original(self, tokens) if tokens else self

    original = RowSampling.fork
    monkeypatch.setattr(RowSampling, "fork", fork)


def take_other_noise(monkeypatch: Patch) -> None:
    """Tokens are drafted with the noise of the position behind theirs."""

    class Shifted(Sampler):
        def __call__(
            self, logits: mx.array, positions: Sequence[int], mask: mx.array | None = None
        ) -> SampledBatch:
            return super().__call__(logits, [at + 1 for at in positions], mask)

    monkeypatch.setattr(draft_model, "Sampler", Shifted)


@pytest.mark.parametrize("plant", [keep_rejected, believe_all, count_drafted, take_other_noise])
def test_planted_bugs_make_drafts_stale(zoo: Zoo, monkeypatch: Patch, plant: Callable[[Patch], None]) -> None:
    """And change no answer: drafts are verified."""
    plant(monkeypatch)
    same, stale, _ = run_situations(zoo, monkeypatch, "llama")
    assert same and stale > 1


def test_the_acceptance_of_the_target_itself_is_whole(zoo: Zoo, monkeypatch: Patch) -> None:
    """Nothing that it drafts is rejected: for rows that join, are preempted, and find their prompt in the
    prefix cache."""
    asks = [ask for name in ("", "again ") for ask in list_asks()]
    asks = [
        TimedRequest(replace(ask.request, id=f"{i} {ask.id}"), ask.add_step + 40 * (i > 3))
        for i, ask in enumerate(asks)
    ]
    same, stale, engine = run_twice(zoo, monkeypatch, "llama", zoo.text("llama"), asks, preempts=True)
    counts = engine.scheduler.drafts.counts
    assert same and stale == 0
    assert counts.accepted == counts.drafted > 60


def make_noisy(folder: Path, source: Path) -> Path:
    """A copy of a model, whose weights are off by a few percent."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    noisy = {k: w * (1 + 0.04 * rng.standard_normal(w.shape, dtype=np.float32)) for k, w in weights.items()}
    save_file({k: w.astype(weights[k].dtype) for k, w in noisy.items()}, folder / "model.safetensors")
    return folder


def test_models_that_agree_now_and_then(zoo: Zoo, monkeypatch: Patch, tmp_path: Path) -> None:
    """A copy with noise in its weights, and one of another architecture."""
    rates = []
    noisy = make_noisy(tmp_path / "noisy", zoo.text("llama"))
    for draft in (noisy, zoo.text("gemma3_text")):
        # Or those that fail would soon draft no more.
        monkeypatch.setattr(Acceptance, "expect", lambda _, count: 0.75 * count)
        same, _, engine = run_twice(zoo, monkeypatch, "llama", draft, list_asks(), preempts=True)
        counts = engine.scheduler.drafts.counts
        assert same and counts.drafted > 40
        rates.append(counts.accepted / counts.drafted)
    assert 0.2 < rates[0] < 1 and rates[1] < 0.2


def test_a_grammar_holds_whatever_is_drafted(zoo: Zoo, monkeypatch: Patch) -> None:
    asks = [
        TimedRequest(replace(ask.request, grammar=EveryOtherToken()), ask.add_step) for ask in list_asks()
    ]
    same, _, engine = run_twice(zoo, monkeypatch, "llama", zoo.text("llama"), asks, preempts=True)
    assert same and engine.scheduler.drafts.counts.accepted > 3


def test_a_draft_model_that_fails_fails_no_request(zoo: Zoo, monkeypatch: Patch) -> None:
    asks = list_asks()
    without = engine_driver.run_requests(make_engine(zoo, None), asks)
    engine = make_engine(zoo, zoo.text("llama"))
    calls, original = [0], DraftModel.run_forward

    def fail(self: DraftModel, *given: Any) -> mx.array:
        calls[0] += 1
        if calls[0] == 12:
            raise RuntimeError("planted")
        return original(self, *given)

    monkeypatch.setattr(DraftModel, "run_forward", fail)
    found = engine_driver.run_requests(engine, asks)
    assert calls[0] == 12 and engine.generation.errors == 0
    assert all(is_same(found[rid], without[rid]) for rid in without)
    described = engine.scheduler.drafts.describe()
    assert described["method"] == "off" and described["drafted"] > 0
    assert described["problem"] == "draft is off because it failed: RuntimeError: planted"
    assert not vars(engine.scheduler.drafts.source._source).keys() & {"_batch", "_caller"}, "it holds arrays"


def test_a_step_that_fails_loses_no_request(zoo: Zoo, monkeypatch: Patch) -> None:
    """All rows are computed again, those of the draft model too."""
    asks = list_asks()
    without = engine_driver.run_requests(make_engine(zoo, None), asks)
    engine = make_engine(zoo, zoo.text("llama"))
    runner = engine_driver.get_runner(engine)
    calls, original = [0], runner.execute

    def fail(plan: Any) -> Any:
        calls[0] += 1
        if calls[0] == 8:
            raise RuntimeError("planted")
        return original(plan)

    monkeypatch.setattr(runner, "execute", fail)
    found = engine_driver.run_requests(engine, asks)
    assert engine.generation.errors == 1
    assert all(is_same(found[rid], without[rid]) for rid in without)
    assert engine.scheduler.drafts.counts.accepted > 20


def test_its_rows_count_in_the_memory(zoo: Zoo) -> None:
    """The weights of both models, and the keys of both for each token."""
    alone, both = make_engine(zoo, None), make_engine(zoo, zoo.text("llama"))
    without, drafting = (engine.scheduler.limits.memory for engine in (alone, both))
    assert drafting.weights - without.weights > count_weight_bytes(
        engine_driver.get_runner(alone)._caller.model
    )
    assert drafting.footprint.per_token == 2 * without.footprint.per_token


def test_auto_drafts_with_both_and_says_so(zoo: Zoo) -> None:
    draft = str(zoo.text("llama"))
    for method, model, expected in (
        ("auto", draft, "draft+ngram"),
        ("auto", None, "ngram"),
        ("ngram", None, "ngram"),
        ("draft", draft, "draft"),
    ):
        engine = make_engine(zoo, None, speculation=SpeculationSettings(method), draft=model)
        assert engine.scheduler.drafts.describe()["method"] == expected


@pytest.mark.parametrize(
    ("family", "draft", "message"),
    [
        ("llama", "qwen3_next", "has caches of another kind than keys and values"),
        ("llama", "mamba2", "has caches of another kind than keys and values"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(zoo: Zoo, family: str, draft: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.draft: .* cannot draft: it {message}"):
        make_engine(zoo, zoo.text(draft), family)


def test_a_row_that_outgrows_the_context_drafts_no_more(zoo: Zoo, tmp_path: Path) -> None:
    """As an image does that the draft model cannot see."""
    folder = tmp_path / "short"
    shutil.copytree(zoo.text("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    engine = make_engine(zoo, folder)
    asks = [engine_driver.make_text_request(str(n), PROMPTS[n], max_tokens=40) for n in (2, 3)]
    events = engine_driver.run_requests(engine, asks)
    assert [len(events[ask.id].tokens) for ask in asks] == [40, 40]
    drafted = engine.scheduler.drafts.counts.drafted
    assert 5 < drafted < 24
    engine_driver.run_requests(engine, [replace(asks[1], id="seen", image_spans=((1, 3),))])
    assert engine.scheduler.drafts.counts.drafted == drafted


def test_one_model_chooses_tokens_and_drafts(zoo: Zoo) -> None:
    """Its drafts of rows whose prompts have gaps change no answer; it is loaded once."""
    small, sparse = zoo.text("qwen3"), PrefillSettings("draft", 0.6, 256)
    engine = make_engine(zoo, small, prefill=sparse)
    assert engine.selection is not None
    assert engine.selection.selector._caller is engine.scheduler.drafts.source._source._caller  # type: ignore
    long = text_models.prompts(11, (300, 270))
    asks = [engine_driver.make_text_request(str(i), prompt) for i, prompt in enumerate(long)]
    found = engine_driver.run_requests(engine, asks)
    counts = replace(engine.scheduler.drafts.counts)
    assert counts.drafted > 5 and engine.selection.counts.left_out > 100
    without = engine_driver.run_requests(engine, [replace(ask, speculation=False) for ask in asks])
    assert engine.scheduler.drafts.counts == counts
    assert all(is_same(found[ask.id], without[ask.id]) for ask in asks)
    chooses = make_engine(zoo, small, prefill=sparse, speculation=SpeculationSettings("ngram"))
    assert chooses.selection is not None and chooses.scheduler.drafts.describe()["method"] == "ngram"
    for prefill in (sparse, PrefillSettings()):
        with pytest.raises(ConfigError, match=r"of the weights are model\.draft") as caught:
            make_engine(zoo, small, prefill=prefill, memory_limit=1000)
        assert ("tokens in model.draft" in str(caught.value)) == (prefill is sparse)
