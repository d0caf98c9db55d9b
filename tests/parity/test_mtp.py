"""Drafts of a checkpoint's own head change no answer, and the head is told what the model computes.

A head with random weights predicts nothing, so drafts are made of the answer that a row must get, with wrong
tokens in some places. One head is made so that it is always right. Decoding is by pages, whose attention on a
CPU is gathered.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from PIL import Image

from benchmarks.tiny.random_models import write_text_model
from mlxrun.config.settings import SpeculationSettings
from mlxrun.core.errors import ConfigError
from mlxrun.core.request import TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.draft_planner import DraftCounts
from mlxrun.model.load.model_files import read_json
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.speculation import build as speculation_build
from mlxrun.model.speculation import mtp_source
from mlxrun.model.speculation.drafted_rows import DraftedRows
from mlxrun.model.speculation.mtp_rows import MTPRows
from mlxrun.model.speculation.mtp_source import MTPSource
from tests.helpers import engine_driver, mtp_models, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import mark_sweep

Patch = pytest.MonkeyPatch
Answers = dict[str, TokenEvent]
Plain = Callable[[str], Answers]
Folder = Callable[[str], Path]
FAMILIES = ("glm4_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite")
ROWS, COUNT = 12, 16
PROMPTS = text_models.prompts(7, (3, 9, 17, 40))
JOINS = (0, 3, 0, 5)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.7, "seed": 5},
    {"min_tokens": 6, "logprobs": 3},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The tiny model of a family, with a head."""

    @functools.cache
    def build(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        write_text_model(family, path)
        mtp_models.save_head(family, path, mtp_models.draw_head(family, path))
        return path

    return build


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: Patch) -> None:
    """The time of a tiny model's head is noise: it costs as little as one can."""
    monkeypatch.setattr(speculation_build, "time_draft", lambda *args: 0.0)
    monkeypatch.setattr("mlxrun.engine.build_drafts.measure_row_cost", lambda *args: 0.0)


def make_engine(folder: Path, method: Any = "mtp", decode: Any = "paged", **options: Any) -> Engine:
    methods = ComputeMethods(decode, fixed_width=ROWS)
    speculation = SpeculationSettings(method, max_tokens=5) if method != "off" else SpeculationSettings()
    return engine_driver.make_real_engine(
        folder, methods, speculation=speculation, max_running=ROWS, **options
    )


def list_asks(**more: Any) -> list[TimedRequest]:
    given = [{"max_tokens": COUNT, "logprobs": 1} | s | more for s in SETTINGS]
    asks = [engine_driver.make_text_request(str(i), p, **given[i]) for i, p in enumerate(PROMPTS)]
    return [TimedRequest(ask, at) for ask, at in zip(asks, JOINS, strict=True)]


@pytest.fixture(scope="module")
def plain(folder: Folder) -> Plain:
    """The answers of a family without drafts."""
    return functools.cache(
        lambda family: engine_driver.run_requests(make_engine(folder(family), "off"), list_asks())
    )


def draft_from(monkeypatch: Patch, known: Answers) -> None:
    """Make each row's drafts of its answer, every fifth token of it replaced by a wrong one. The head drafts
    too, so that its keys are those of a draft."""
    original, lengths = MTPRows.draft, {str(i): len(p) for i, p in enumerate(PROMPTS)}

    def draft(self: MTPRows, limits: dict[str, int], sample: Any) -> dict[str, tuple[int, ...]]:
        assert original(self, limits, sample).keys() == limits.keys()
        at = {rid: self._lengths[self._slots[rid]] + 1 - lengths.get(rid, 0) for rid in limits}
        right = {rid: known[rid].tokens if rid in known else () for rid in limits}
        wrong = {rid: tuple(t ^ (i % 5 == 4) for i, t in enumerate(right[rid])) for rid in limits}
        return {rid: wrong[rid][at[rid] :][:limit] for rid, limit in limits.items()}

    monkeypatch.setattr(MTPRows, "draft", draft)


def is_same(first: TokenEvent, second: TokenEvent) -> bool:
    """Tokens, how the answer ended, and logprobs but for the rounding of a CPU, which knows a row's place."""
    return (
        first.tokens == second.tokens
        and first.finish is second.finish
        and all(
            abs(a.logprob - b.logprob) < 1e-4 for a, b in zip(first.logprobs, second.logprobs, strict=True)
        )
    )


def run_drafts(path: Path, monkeypatch: Patch, without: Answers) -> tuple[bool, DraftCounts]:
    """Whether all answers are the same with drafts; and how many there were."""
    draft_from(monkeypatch, without)
    engine = make_engine(path)
    noise = [
        TimedRequest(engine_driver.make_text_request(f"noise {i}", p), i, i + 7)
        for i, p in enumerate(PROMPTS[:2])
    ]
    asks = [*list_asks(), *noise]
    found = engine_driver.run_requests(engine, asks)
    drafts = engine.scheduler.drafts
    assert drafts.describe()["problem"] is None and engine.generation.errors == 0
    return all(is_same(found[rid], without[rid]) for rid in without), drafts.modelled


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_answer(folder: Folder, plain: Plain, monkeypatch: Patch, family: str) -> None:
    """Greedy, sampled, with penalties, among others that are aborted, joining late."""
    same, counts = run_drafts(folder(family), monkeypatch, plain(family))
    assert counts.drafted > counts.accepted > 15, "too little was drafted to prove anything"
    assert same


def test_preempted_rows(folder: Folder, plain: Plain, monkeypatch: Patch) -> None:
    """Rows that draft lose their place and come back; the head then sees only what follows."""
    preempted: list[str] = []

    def preempt(engine: Engine) -> None:
        rows = [s for s in engine.scheduler.requests if s.decoding and not s.num_in_flight and s.output]
        rows = [s for s in rows if not s.id.startswith("noise")]
        if rows and len(preempted) < 4:
            engine.scheduler.preempt(rows[0])
            preempted.append(rows[0].id)

    draft_from(monkeypatch, plain("glm4_moe"))
    engine = make_engine(folder("glm4_moe"))
    events = engine_driver.run_requests(engine, list_asks(), lambda step: preempt(engine))
    assert len(preempted) == 4 and engine.scheduler.drafts.describe()["problem"] is None
    assert all(is_same(events[rid], answer) for rid, answer in plain("glm4_moe").items())


def accept_all(monkeypatch: Patch) -> None:
    """Drafted tokens count without being compared."""
    monkeypatch.setattr(DraftedRows, "count_accepted", lambda self, sampled: self.counts)


def test_skipping_the_verification_is_found(folder: Folder, plain: Plain, monkeypatch: Patch) -> None:
    """The twin of the tests above."""
    without = plain("glm4_moe")
    accept_all(monkeypatch)
    assert not run_drafts(folder("glm4_moe"), monkeypatch, without)[0]


# -- what the head is told ------------------------------------------------------------------------------


class RecordedPairs:
    """The pairs that a head is told of each row since the row began to run."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.pairs: dict[str, list[tuple[mx.array, int]]] = {}
        prompt, step = MTPRows.read_prompt, MTPRows.read_step

        def read_prompt(rows: MTPRows, rid: str, hidden: mx.array, tokens: Any) -> None:
            self._add(rid, hidden, mx.array(tokens).tolist() if hidden.shape[0] else [])
            prompt(rows, rid, hidden, tokens)

        def read_step(
            rows: MTPRows, ids: Sequence[str], hidden: mx.array, tokens: mx.array, counts: Any, kept: Any
        ) -> None:
            step(rows, ids, hidden, tokens, counts, kept)
            found, start = tokens.tolist(), 0
            for rid, count, size in zip(ids, counts or [1] * len(ids), kept or [1] * len(ids), strict=True):
                self._add(rid, hidden[start : start + size], found[start : start + size])
                start += count

        monkeypatch.setattr(MTPRows, "read_prompt", read_prompt)
        monkeypatch.setattr(MTPRows, "read_step", read_step)

    def _add(self, rid: str, hidden: mx.array, tokens: list[int]) -> None:
        self.pairs.setdefault(rid, []).extend(zip(hidden, tokens, strict=True))

    def matches(self, rid: str, tokens: list[int], states: mx.array) -> bool:
        """Whether the pairs are those of the end of a text, of which the model has these hidden states
        [n, D]. The newest token may be unknown to the head yet, or known although it was not the row's."""
        pairs = self.pairs[rid]
        for end in (len(tokens), len(tokens) - 1, len(tokens) + 1):
            first = end - 1 - len(pairs)
            if first < 0:
                continue
            known = pairs[: len(tokens) - 1 - first]
            if [token for _, token in known] == tokens[first + 1 : first + 1 + len(known)]:
                hidden = mx.stack([each for each, _ in known])
                return bool(mx.allclose(hidden, states[first : first + len(known)], atol=1e-4))
        return False


def compute_states(model: Any, text: list[int]) -> mx.array:
    """The hidden states [n, D] that a model of mlx-lm has of a text."""
    trunk = model.backbone if "backbone" in model else model.model
    return trunk(mx.array([text]))[0]


def compare_pairs(
    path: Path, monkeypatch: Patch, without: Answers, plant: Callable[[Patch], None] | None = None
) -> bool:
    """Whether the head is told the states that the library computes for each row's whole text, over two
    turns of which the second begins with a hit."""
    recorded = RecordedPairs(monkeypatch)
    if plant is not None:
        plant(monkeypatch)
    draft_from(monkeypatch, without)
    engine = make_engine(path)
    engine_driver.run_requests(engine, list_asks())
    turns = {f"turn {rid}": [*PROMPTS[int(rid)], *answer.tokens, 5, 6, 7] for rid, answer in without.items()}
    asks = [TimedRequest(engine_driver.make_text_request(rid, ids)) for rid, ids in turns.items()]
    events = engine_driver.run_requests(engine, asks)
    assert all(events[rid].num_cached_tokens for rid in turns)
    assert engine.scheduler.drafts.modelled.accepted > 8
    texts = {rid: [*PROMPTS[int(rid)], *answer.tokens] for rid, answer in without.items()}
    texts |= {rid: [*ids, *events[rid].tokens] for rid, ids in turns.items()}
    model: Any = load_model(path, strict=False)[0]
    assert all(len(recorded.pairs[rid]) >= len(texts[rid]) - 2 for rid in without), "a prompt is missing"
    assert all(20 < len(recorded.pairs[rid]) < len(texts[rid]) - 8 for rid in turns), "what was restored"
    return all(recorded.matches(rid, text, compute_states(model, text)) for rid, text in texts.items())


@pytest.mark.parametrize(
    "family", mark_sweep([*FAMILIES, "qwen3_5", "exaone_moe", "nemotron_h", "mimo", "ernie4_5_moe"], FAMILIES)
)
def test_the_head_is_told_what_the_model_computes(
    folder: Folder, plain: Plain, monkeypatch: Patch, family: str
) -> None:
    assert compare_pairs(folder(family), monkeypatch, plain(family))


def test_of_a_long_prompt_the_head_is_told_the_end(folder: Folder, plain: Plain, monkeypatch: Patch) -> None:
    """In chunks, of which the first ones are too early."""
    monkeypatch.setattr(mtp_source, "KEPT", 10)
    recorded, without = RecordedPairs(monkeypatch), plain("glm4_moe")["3"]
    path = folder("glm4_moe")
    engine_driver.run_requests(make_engine(path), list_asks()[3:])
    text = [*PROMPTS[3], *without.tokens]
    assert 10 + COUNT - 2 <= len(recorded.pairs["3"]) <= 10 + COUNT
    model: Any = load_model(path, strict=False)[0]
    assert recorded.matches("3", text, compute_states(model, text))


def tell_rejected(monkeypatch: Patch) -> None:
    """Rejected tokens count as the row's."""
    original = MTPRows.read_step
    monkeypatch.setattr(
        MTPRows, "read_step", lambda self, ids, h, t, counts, kept: original(self, ids, h, t, counts, counts)
    )


def tell_late(monkeypatch: Patch) -> None:
    """A chunk's states go with its own tokens, not with those behind."""
    original = MTPSource.read_prompt

    def read_prompt(self: MTPSource, rid: str, hidden: mx.array, tokens: Any) -> None:
        original(self, rid, mx.roll(hidden, 1, axis=0), tokens)

    monkeypatch.setattr(MTPSource, "read_prompt", read_prompt)


@pytest.mark.parametrize("plant", [tell_rejected, tell_late])
def test_telling_the_head_something_else_is_found(
    folder: Folder, plain: Plain, monkeypatch: Patch, plant: Callable[[Patch], None]
) -> None:
    """The twins of the test above."""
    assert not compare_pairs(folder("glm4_moe"), monkeypatch, plain("glm4_moe"), plant)


# -- a head that is always right ------------------------------------------------------------------------


def write_certain_model(path: Path) -> None:
    """A model whose next token follows from the newest one alone, with a head that knows it: no layer adds
    anything, and the head passes the token's embedding on."""
    write_text_model("mimo", path)
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    head = mtp_models.draw_head("mimo", path)
    for arrays in (weights, head):
        for name, array in arrays.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                arrays[name] = mx.zeros_like(array)
            elif name.endswith("norm.weight"):
                arrays[name] = mx.ones_like(array)
    width = head["project.weight"].shape[0]
    head["project.weight"] = mx.concatenate([mx.zeros((width, width)), mx.eye(width)], axis=1)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    mtp_models.save_head("mimo", path, head)


def run_certain(path: Path, method: Any, **params: Any) -> tuple[Answers, DraftCounts, int]:
    """Answers, drafts and steps."""
    engine = make_engine(path, method)
    asks = [engine_driver.make_text_request(str(i), p, seed=i, **params) for i, p in enumerate(PROMPTS)]
    events = engine_driver.run_requests(engine, asks)
    return events, engine.scheduler.drafts.modelled, engine.generation.steps


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_a_head_that_is_right_saves_steps(tmp_path: Path, monkeypatch: Patch, params: Any) -> None:
    """Every drafted token is accepted, sampled ones too: their noise is that of their position. The twin
    tells the head other tokens than were sampled."""
    write_certain_model(tmp_path)
    answers, _, most = run_certain(tmp_path, "off", **params)
    events, counts, steps = run_certain(tmp_path, "mtp", **params)
    assert all(events[rid].tokens == answers[rid].tokens for rid in answers)
    assert counts.accepted == counts.drafted > 40
    assert steps < most
    if not params:
        original = MTPRows.read_step

        def read_step(self: MTPRows, ids: Any, hidden: mx.array, tokens: mx.array, *more: Any) -> None:
            original(self, ids, hidden, mx.zeros_like(tokens), *more)

        monkeypatch.setattr(MTPRows, "read_step", read_step)
        events, counts, _ = run_certain(tmp_path, "mtp")
        assert all(events[rid].tokens == answers[rid].tokens for rid in answers)
        assert counts.accepted < counts.drafted / 2


def test_a_head_that_fails_drafts_no_more(folder: Folder, plain: Plain, monkeypatch: Patch) -> None:
    """No request notices, and the status says why."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no memory for the head")

    monkeypatch.setattr(MTPRows, "run_forward", fail)
    monkeypatch.setattr(speculation_build, "time_step", lambda *args: 1.0)
    engine = make_engine(folder("glm4_moe"))
    found = engine_driver.run_requests(engine, list_asks())
    assert all(is_same(found[rid], answer) for rid, answer in plain("glm4_moe").items())
    assert engine.generation.errors == 0
    described = engine.scheduler.drafts.describe()
    assert described["method"] == "off" and "no memory for the head" in described["problem"]
    rows = engine.scheduler.drafts.source._source.rows  # type: ignore[union-attr]
    assert not (rows._slots or rows._prompts or rows.list_arrays())


def test_rows_with_images_draft(tmp_path: Path) -> None:
    """A vision model's head has a layer of mlx-lm, whichever library computes the model."""
    vision_models.build("qwen3_5", tmp_path)
    mtp_models.save_head("qwen3_5", tmp_path, mtp_models.draw_head("qwen3_5", tmp_path))
    image, text = Image.new("RGB", (56, 56), "red"), "<|vision_start|><|image_pad|><|vision_end|>what"
    found = []
    for method in ("off", "mtp"):
        engine = make_engine(tmp_path, method)
        asks = [
            engine_driver.make_vision_request(engine, "image", text, [image]),
            engine_driver.make_vision_request(engine, "text", PROMPTS[2]),
        ]
        found.append(engine_driver.run_requests(engine, asks))
    assert all(is_same(found[0][rid], found[1][rid]) for rid in found[0])
    assert engine.scheduler.drafts.modelled.drafted > 0
    assert engine.scheduler.drafts.describe()["problem"] is None


def test_a_quantized_head_drafts(tmp_path: Path) -> None:
    """Beside a model that is not; it is multiplied as a model's quantized weights are."""
    write_text_model("glm4_moe", tmp_path)
    head = mtp_models.draw_head("glm4_moe", tmp_path)
    for name in [name for name, array in head.items() if name.endswith("proj.weight") and array.ndim == 2]:
        packed = mx.quantize(head[name], group_size=32, bits=8)
        kinds = (name, name.replace("weight", "scales"), name.replace("weight", "biases"))
        head |= dict(zip(kinds, packed, strict=True))
    mtp_models.save_head("glm4_moe", tmp_path, head)
    engine = make_engine(tmp_path)
    engine_driver.run_requests(engine, list_asks())
    assert engine.scheduler.drafts.modelled.drafted > 0
    assert engine.scheduler.drafts.describe()["problem"] is None


def test_a_closed_engine_holds_neither_the_model_nor_the_head(folder: Folder, monkeypatch: Patch) -> None:
    monkeypatch.setattr(mx, "clear_streams", lambda: None)  # other tests need those of this thread
    engine = make_engine(folder("glm4_moe"))
    engine_driver.run_requests(engine, list_asks()[:1])
    assert engine.scheduler.drafts.modelled.drafted
    source: Any = engine.scheduler.drafts.source._source
    held = [
        weakref.ref(each)
        for each in (source, source.rows._head, engine_driver.get_runner(engine)._caller.model)
    ]
    del source
    engine.close()
    gc.collect()
    assert [each() for each in held] == [None] * 3


@pytest.mark.parametrize("method", ["mtp", "auto"])
def test_a_head_of_its_own_folder_drafts(folder: Folder, tmp_path: Path, method: Any) -> None:
    """`model.draft` may be a head that mlx-vlm has split off; any other model is none."""
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

    path = folder("qwen3_next")
    get_mtp_splitter(source_config=read_json(path / "config.json")).split(str(path), str(tmp_path))
    found = make_engine(path, method, draft=str(tmp_path)).scheduler.drafts.describe()
    assert found["method"] == ("mtp" if method == "mtp" else "mtp+ngram")
    with pytest.raises(
        ConfigError, match=r"speculation\.method: mtp cannot be used: model\.draft .* no head"
    ):
        make_engine(path, draft=str(folder("glm4_moe")))


@pytest.mark.parametrize(
    ("family", "decode", "problem"),
    [
        ("deepseek_v3", "ragged", "decodes ragged"),
        ("llama", "paged", "no format of MTP heads is known for model type llama"),
    ],
)
def test_what_has_no_head_says_so(tmp_path: Path, family: str, decode: Any, problem: str) -> None:
    """`mtp` is an error; `auto` looks n-grams up, or drafts nothing where that is not possible."""
    write_text_model(family, tmp_path)
    with pytest.raises(ConfigError, match=rf"speculation\.method: mtp cannot be used: .*{problem}"):
        make_engine(tmp_path, decode=decode)
    found = make_engine(tmp_path, "auto", decode=decode).scheduler.drafts.describe()
    assert found["method"] == ("off" if decode == "ragged" else "ngram")
