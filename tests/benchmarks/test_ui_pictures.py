"""The pictures of the server's page for the documentation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import ui_pictures
from tests.helpers.browser_pages import BROWSER, open_page
from tests.helpers.server_fakes import make_script, run_server


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
async def test_pictures_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui_pictures, "LOAD_SECONDS", 0.5)
    async with run_server(script=make_script("42 " * 300)) as s, open_page() as page:
        await ui_pictures.take_chat_picture(page, s.url, tmp_path)
        s.engine.script = make_script("a", asyncio.Event().wait)
        await ui_pictures.take_server_picture(page, s.url, tmp_path)
    for name, height in (("chat", ui_pictures.CHAT_HEIGHT), ("server", ui_pictures.SERVER_HEIGHT)):
        with Image.open(tmp_path / f"ui-{name}.png") as image:
            assert image.size == (ui_pictures.WIDTH, height)
            assert len(image.convert("RGB").getcolors() or ()) > 10


def test_the_pictures_of_the_documentation_are_there() -> None:
    text = (ui_pictures.ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    for name in ("ui-chat", "ui-server"):
        assert f"(images/{name}.png)" in text
        assert (ui_pictures.IMAGES / f"{name}.png").stat().st_size < 100_000
