"""The session's tiny models: each family is built once, each ORACLE answer is computed once.

conftest.py takes the fixture with `from fixtures_models import zoo`. A test asks `zoo.text("llama")` for a
folder, `zoo.answer("llama", ids)` or `zoo.see("qwen3_vl", prompt, images)` for what must come out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.tiny.random_models import write_vision_model
from tests.helpers import oracle, text_models, vision_models
from tests.helpers.oracle import Answer


class Zoo:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._answers: dict[tuple[object, ...], Answer] = {}

    def text(self, family: str, seed: int | None = None, ends: bool = False) -> Path:
        """The folder of a text model; with `ends` it can say <|im_end|>."""
        return self._folder("text", family, text_models.build, seed, ends)

    def vision(self, family: str, seed: int | None = None, ends: bool = False) -> Path:
        return self._folder("vision", family, vision_models.build, seed, ends)

    def video(self, family: str) -> Path:
        """A vision model whose template renders videos."""
        folder = self._root / f"video-{family}"
        return folder if folder.exists() else vision_models.build_with_video(family, folder)

    def omni(self, family: str) -> Path:
        """A model that takes images, videos and audio."""
        folder = self._root / f"omni-{family}"
        if not folder.exists():
            write_vision_model(family, folder)
        return folder

    def answer(self, family: str, ids: Sequence[int], count: int = 24, ends: bool = False) -> Answer:
        """ORACLE of a text model."""
        key = ("text", family, tuple(ids), count, ends)
        if key not in self._answers:
            self._answers[key] = oracle.text_answer(self.text(family, ends=ends), ids, count)
        return self._answers[key]

    def see(
        self,
        family: str,
        prompt: str | Sequence[int],
        images: Sequence[Image.Image] = (),
        count: int = 24,
    ) -> Answer:
        """ORACLE of a vision model, for rendered text with a placeholder an image, or ids without images."""
        pixels = tuple((image.size, image.tobytes()) for image in images)
        key = ("vision", family, prompt if isinstance(prompt, str) else tuple(prompt), pixels, count)
        if key not in self._answers:
            self._answers[key] = oracle.vision_answer(self.vision(family), prompt, images, count)
        return self._answers[key]

    def _folder(
        self, kind: str, family: str, build: Callable[..., Path], seed: int | None, ends: bool
    ) -> Path:
        folder = self._root / f"{kind}-{family}-{seed}-{ends}"
        return folder if folder.exists() else build(family, folder, seed, ends)


def mark_sweep(families: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of a test over families, or tuples of parameters: those that are not `kept` run in the
    sweep only."""
    return [
        pytest.param(*(f if isinstance(f, tuple) else (f,)), marks=() if f in kept else pytest.mark.sweep)
        for f in families
    ]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


_PROBED: dict[str, Any] = {}


def choose_once(adapter: Any, vocab: int, config: Any, *others: Any) -> Any:
    """`choose_methods`, whose choice is made once a session for each model and the settings that it reads."""
    from mlxrun.model.kv.ragged import decode_batch, row_group
    from mlxrun.model.load_check import choose  # a second of imports, which most tests do without

    groups = (decode_batch.SHORTEST_BUCKET, row_group.BUFFER_STEP, row_group.SPARE_TOKENS)
    scheduler, engine, cached = config.scheduler, config.engine, config.cache.backend != "none"
    used = (scheduler.chunk, scheduler.prefill_budget, scheduler.prefill_rows)
    width = scheduler.max_running if engine.reproducible else 0
    drafts = config.speculation.method != "off"
    key = repr((type(adapter), config.model, engine, used, width, cached, drafts, others[1:], groups))
    if key not in _PROBED:
        _PROBED[key] = choose.choose_methods(adapter, vocab, config, *others)
    return choose.follow_report(adapter, _PROBED[key])


@pytest.fixture
def probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a model that was probed for the same settings earlier in this session take what was chosen
    then: it takes longer than most tests. Not for tests that plant a bug before they make an engine."""
    monkeypatch.setattr("mlxrun.model.model_loading.choose_methods", choose_once)
