"""Rows about the same images hold them once in pages, and still give the ORACLE's answers."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image

from benchmarks.tiny import library_loop
from benchmarks.tiny.processor_files import PROCESSORS
from benchmarks.tiny.random_models import read_vision_info, write_vision_model
from mlxrun.core.request import TokenEvent
from mlxrun.engine.build import build_engine
from mlxrun.engine.engine import Engine
from mlxrun.model.kv.paged import page_table
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.run import runner
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers import engine_driver, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

COUNT, ROWS = 10, 8
PAGE = 8  # of use_small_groups
ONE, OTHER = vision_models.images(3, 2, size=(64, 64))
INTRO = "here is what I see: "
WHOLE = "gemma4_unified"  # its image tokens see each other

Patch = pytest.MonkeyPatch
Cases = Mapping[str, Sequence[Sequence[str | Image.Image]]]  # the turns of users, by name

CASES: Cases = {
    "question": [["look ", ONE, " tell me what it is"]],
    "another question": [["look ", ONE, " tell me which colour it has"]],
    "the same again": [["look ", ONE, " tell me what it is"]],
    "another image": [["look ", OTHER, " tell me what it is"]],
    "two": [["look ", ONE, " and ", OTHER, " which?"]],
    "swapped": [["look ", OTHER, " and ", ONE, " which?"]],
    "second turn": [[INTRO], ["and ", ONE, " what is in here?"]],
    "another second turn": [[INTRO], ["and ", OTHER, " what is in here?"]],
    "second turn again": [[INTRO], ["and ", ONE, " what is in there?"]],
    "text": [[INTRO], ["and nothing here?"]],
}


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    engine_driver.use_small_groups(monkeypatch)


class PageWatch:
    """What joining rows would have copied, compared with what their pages hold. `off`: the largest
    difference; `shared`: tokens of each row in pages that others had before it; `most`: pages in use."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.off, self.most = 0.0, 0
        self.shared: dict[str, int] = {}
        update = PagedDecodeBatch.update

        def watch(batch: PagedDecodeBatch, keep: Any, joining: Any, expected: Any = ()) -> None:
            own = {row.id: layer_caches.view_row(row.cache) for row in joining}
            table = batch._tables[None]
            for row in joining:
                self.shared[row.id] = PAGE * sum(key in table._shared for key in row.page_keys)
            update(batch, keep, joining, expected)
            for rid, view in own.items():
                self._compare(batch, view, batch.view_row(rid)[1])
            self.most = max(self.most, table.used - 1)

        monkeypatch.setattr(PagedDecodeBatch, "update", watch)

    def _compare(self, batch: PagedDecodeBatch, own: Any, held: Any) -> None:
        for layer in (i for i, w in zip(batch._keyed, batch._windows, strict=True) if w is None):
            size = own.layers[layer].length
            for one, other in zip(own.layers[layer][:2], held.layers[layer][:2], strict=True):
                difference = mx.abs(one[:, :, :size] - other[:, :, :size]).max()
                self.off = max(self.off, float(difference.item()))


def render(family: str, turns: Sequence[Sequence[str | Image.Image]]) -> tuple[str, list[Image.Image]]:
    parts = [[part if isinstance(part, str) else None for part in turn] for turn in turns]
    text = "well.<|im_end|>\n".join(vision_models.prompt(family, *turn) for turn in parts)
    return text, [part for turn in turns for part in turn if not isinstance(part, str)]


def make_engine(zoo: Zoo, family: str, **options: Any) -> Engine:
    methods = options.pop("methods", ComputeMethods("paged"))
    return engine_driver.make_real_engine(zoo.vision(family), methods, max_running=ROWS, **options)


def list_asks(engine: Engine, family: str, cases: Cases = CASES) -> list[TimedRequest]:
    found = [(name, render(family, turns)) for name, turns in cases.items()]
    asks = [engine_driver.make_vision_request(engine, n, *p, max_tokens=COUNT) for n, p in found]
    return [TimedRequest(ask, i) for i, ask in enumerate(asks)]


def find_wrong(zoo: Zoo, family: str, events: Mapping[str, TokenEvent], cases: Cases = CASES) -> set[str]:
    """The requests that got other answers than the ORACLE's."""
    answers = {name: zoo.see(family, *render(family, turns), COUNT) for name, turns in cases.items()}
    return {name for name, answer in answers.items() if engine_driver.has_other_answer(events[name], answer)}


FAMILIES = [(family, 0) for family in vision_models.VISION] + [("qwen3_vl", 3)]


@pytest.mark.parametrize(
    ("family", "preempted"), mark_sweep(FAMILIES, [*((f, 0) for f in vision_models.CORE), FAMILIES[-1]])
)
def test_answers_are_those_of_each_request_alone(
    zoo: Zoo, family: str, preempted: int, monkeypatch: Patch
) -> None:
    """Rows with the same image share its pages, rows with another only those before it."""
    watch, engine = PageWatch(monkeypatch), make_engine(zoo, family)
    asks = list_asks(engine, family)
    events = engine_driver.run_requests(engine, asks, engine_driver.preempt_every(engine, preempted))
    assert find_wrong(zoo, family, events) == set() and watch.off < 1e-4
    if preempted:
        return
    made, shared = {ask.id: ask.request for ask in asks}, watch.shared
    for name, before in [("another question", "question"), ("second turn again", "second turn")]:
        common = len(os.path.commonprefix([made[name].prompt, made[before].prompt]))
        assert shared[name] == common // PAGE * PAGE >= made[name].image_spans[-1][1]
    for name in ("another image", "another second turn"):
        assert shared[name] == made[name].image_spans[0][0] // PAGE * PAGE
    assert shared["text"] > len(INTRO)
    assert all(shared[name] > made[name].image_spans[0][0] for name in ("two", "swapped"))


def test_ignored_images_are_found(zoo: Zoo, monkeypatch: Patch) -> None:
    """The mutation twin: names of pages that look at tokens alone."""
    monkeypatch.setattr(page_table, "build_content_ids", lambda tokens, spans, digests: array("q", tokens))
    watch, engine = PageWatch(monkeypatch), make_engine(zoo, "qwen3_vl")
    events = engine_driver.run_requests(engine, list_asks(engine, "qwen3_vl"))
    assert {"another image", "swapped", "another second turn"} <= find_wrong(zoo, "qwen3_vl", events)
    assert watch.off > 1e-2


@pytest.mark.parametrize("family", mark_sweep(vision_models.VISION, ("qwen3_vl", "gemma3")))
@pytest.mark.parametrize("before", [3, 9])
def test_bytes_are_those_of_each_request_alone(
    zoo: Zoo, family: str, before: int, monkeypatch: Patch
) -> None:
    """With `engine.reproducible`, also where a chunk ends early because of an image."""
    cases: Cases = {
        "question": [["l" * before, ONE, " what is it?"]],
        "another question": [["l" * before, ONE, " which colour has it?"]],
        "another image": [["l" * before, OTHER, " what is it?"]],
        "two": [["l" * before, ONE, " and ", OTHER, " which?"]],
        "text": [["l" * (before + 30)]],
    }
    methods = ComputeMethods("paged", fixed_width=ROWS, grid=16)
    cold = make_engine(zoo, family, methods=methods, reproducible=True, backend="none")
    asks, alone = list_asks(cold, family, cases), dict[str, TokenEvent]()
    for ask in asks:
        alone |= engine_driver.run_requests(cold, [ask.request])
    watch, engine = PageWatch(monkeypatch), make_engine(zoo, family, methods=methods, reproducible=True)
    events = engine_driver.run_requests(engine, asks)
    assert watch.off == 0 and watch.shared["another question"] > asks[1].request.image_spans[0][0]
    for ask in asks:
        assert events[ask.id].tokens == alone[ask.id].tokens
        assert events[ask.id].logprobs == alone[ask.id].logprobs


def test_pages_of_eight_rows_about_one_image(zoo: Zoo, monkeypatch: Patch) -> None:
    """They hold the image once. The twin names no pages."""
    cases: Cases = {str(i): [["look ", ONE, f" {i}?"]] for i in range(ROWS)}
    watch = PageWatch(monkeypatch)

    def count_pages() -> tuple[int, int]:
        engine, watch.most = make_engine(zoo, "qwen3_vl"), 0
        asks = [TimedRequest(ask.request) for ask in list_asks(engine, "qwen3_vl", cases)]
        events = engine_driver.run_requests(engine, asks)
        assert find_wrong(zoo, "qwen3_vl", events, cases) == set()
        return watch.most, asks[0].request.image_spans[0][1] // PAGE

    most, common = count_pages()
    monkeypatch.setattr(runner, "compute_page_keys", lambda *given: ())
    assert count_pages()[0] - most == (ROWS - 1) * common


@pytest.mark.parametrize("family", mark_sweep(vision_models.VISION, ("qwen3_vl", "gemma3", "qwen3_5")))
def test_questions_about_one_image_at_once_compute_it_once(zoo: Zoo, family: str) -> None:
    """Also where no chunk ends between the image and the questions, and with states and windows."""
    cases: Cases = {str(i): [["look well at this: " * 4, ONE, f"{i}?"]] for i in range(4)}
    engine = make_engine(zoo, family, chunk=512)
    asks = [ask.request for ask in list_asks(engine, family, cases)]
    events = engine_driver.run_requests(engine, asks)
    assert find_wrong(zoo, family, events, cases) == set()
    cached = [events[ask.id].num_cached_tokens >= ask.image_spans[-1][1] for ask in asks]
    assert cached == [False, True, True, True]


def test_images_whose_tokens_see_each_other_are_shared_together(tmp_path: Path, monkeypatch: Patch) -> None:
    """Up to the last image, a page is named by all that is before the end of it: no image is shared where
    another one follows that differs."""
    folder = tmp_path / "model"
    write_vision_model(WHOLE, folder)
    info = read_vision_info(WHOLE, folder)
    config = engine_driver.make_config(folder, max_running=ROWS)
    methods = ComputeMethods("paged", whole_media=True)
    engine = build_engine(config, info, LoadCheckReport(methods, ()))
    texts = {
        "question": ("look IMAGE what is it?", [ONE]),
        "another question": ("look IMAGE which colour?", [ONE]),
        "two": ("look IMAGE and IMAGE which?", [ONE, OTHER]),
        "two again": ("look IMAGE and IMAGE what is it?", [ONE, OTHER]),
        "other two": ("look IMAGE and IMAGE which?", [ONE, ONE]),
    }
    asks = []
    for at, (name, (text, images)) in enumerate(texts.items()):
        made = info.process(text.replace("IMAGE", PROCESSORS[WHOLE].placeholder), images)
        request = engine_driver.make_text_request(name, made.ids, max_tokens=COUNT)
        spans, media, digests = made.image_spans, made.media, made.image_digests
        request = replace(request, image_spans=spans, media=media, image_digests=digests)
        asks.append(TimedRequest(request, at))
    watch = PageWatch(monkeypatch)
    events = engine_driver.run_requests(engine, asks)
    for request in (ask.request for ask in asks):
        answer = library_loop.answer_vision(folder, request.prompt, request.media, COUNT)
        chosen = [token.logprob for token in events[request.id].logprobs]
        assert answer.measure(events[request.id].tokens, chosen) < 1e-4
    assert watch.off < 1e-4
    ends = {ask.id: ask.request.image_spans[-1][1] // PAGE * PAGE for ask in asks}
    assert [name for name, shared in watch.shared.items() if shared >= ends[name]] == [
        "another question",
        "two again",
    ]
    assert watch.shared["two"] == watch.shared["other two"] == 0
