"""The pages of a PDF give the very request that their images give, which test_vision.py compares with the
library; and pages that are swapped, lost or drawn otherwise give another one."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import numpy as np
import pytest

from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media import images
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.media.pdf_process import draw_pages
from mlxrun.config.settings import Config, MediaSettings, ModelSettings
from mlxrun.core.request import Request
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.model_fixtures import Zoo, mark_sweep
from tests.helpers.pdf_files import make_pdf, open_pdf, pdf_url
from tests.helpers.vision_models import CORE

DPI = 72
COLOURS = ("red", "blue", "green")
PDF = make_pdf(*COLOURS, circles=True)


def encode_page(image: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class Preparer:
    """Prepares chats for a tiny model of a family."""

    def __init__(self, zoo: Zoo, family: str) -> None:
        config = Config(model=ModelSettings(path=str(zoo.vision(family))), media=MediaSettings(pdf_dpi=DPI))
        info = load_model_info(config.model)
        self._context = ApiContext(info, config, MediaLoader(config.media, None))

    def prepare(self, *parts: Any) -> Request:
        content = [{"type": "text", "text": "a"}, *parts, {"type": "text", "text": "b"}]
        body = {"messages": [{"role": "user", "content": content}]}
        prepared = asyncio.run(prepare_request("/v1/chat/completions", body, self._context))
        return prepared.requests[0]

    def prepare_pdf(self, data: bytes = PDF) -> Request:
        return self.prepare({"type": "file", "file": {"file_data": pdf_url(data)}})

    def prepare_images(self) -> Request:
        return self.prepare(*map(encode_page, draw_pages(PDF, open_pdf(PDF, DPI).sizes, DPI)))


def are_equal(one: Request, other: Request) -> bool:
    """Whether tokens, spans, digests and every array of pixels are the same, bit by bit."""
    same = (one.prompt, one.image_spans, one.image_digests, one.cache_positions) == (
        *(other.prompt, other.image_spans, other.image_digests),
        other.cache_positions,
    )
    arrays = [{key: np.asarray(value) for key, value in each.media.items()} for each in (one, other)]
    return same and all(np.array_equal(arrays[0][key], arrays[1][key]) for key in arrays[0] | arrays[1])


@pytest.mark.parametrize("family", mark_sweep(CORE, ["qwen3_vl"]))
def test_the_request_of_the_pages(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preparer = Preparer(zoo, family)
    expected = preparer.prepare_images()
    assert are_equal(preparer.prepare_pdf(), expected)
    assert len(set(expected.image_digests)) == len(COLOURS)
    assert not are_equal(preparer.prepare_pdf(make_pdf(*COLOURS[::-1], circles=True)), expected)
    for mutate in (lambda pages: pages[::-1], lambda pages: [pages[0], *pages[:-1]]):
        monkeypatch.setattr(images, "draw_pages", lambda *given, m=mutate: m(draw_pages(*given)))
        assert not are_equal(preparer.prepare_pdf(), expected), "swapped pages, or one that is lost"
    monkeypatch.undo()
    assert are_equal(preparer.prepare_pdf(), expected)
