"""The pictures of reports for the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import report_pictures
from mlxrun.evals.reports.page import render_page
from tests.helpers.batch_fakes import chats
from tests.helpers.browser_pages import BROWSER
from tests.helpers.report_jobs import read_lines


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
async def test_pictures_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BROWSER is not None
    (tmp_path / "a.html").write_text(render_page(await read_lines(tmp_path, chats(20))), encoding="utf-8")
    picture = report_pictures.ReportPicture("a", "a.html", 500, True, "#line/line-3")
    monkeypatch.setattr(report_pictures, "PICTURES", (picture,))
    await report_pictures.take_pictures(BROWSER, tmp_path, tmp_path)
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (report_pictures.WIDTH, 500) and len(image.convert("RGB").getcolors() or ()) > 10
    assert (tmp_path / "a.png").stat().st_size < 200_000


def test_the_pictures_of_the_documentation_are_there() -> None:
    text = (report_pictures.ROOT / "docs" / "evals.md").read_text(encoding="utf-8")
    for picture in report_pictures.PICTURES:
        assert f"(images/{picture.name}.png)" in text
        assert (report_pictures.IMAGES / f"{picture.name}.png").stat().st_size < 200_000
