"""Errors as pages: who gets them, and that they run nothing."""

from __future__ import annotations

import pytest

from mlxrun.server.http.error_page import make_error_page
from tests.server.endpoints.test_runs import FakePages, serve_runs

BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.mark.parametrize("path", ["/ui/runs?run=none", "/ui/runs?run=broken", "/ui/nothing", "/nothing"])
async def test_browsers_get_a_page_and_programs_json(path: str) -> None:
    """The same message and status, and headers that allow no script."""
    async with serve_runs(FakePages()) as s:
        page, plain = await s.get(path, Accept=BROWSER), await s.get(path, Accept="*/*")
        assert page.status == plain.status >= 400
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        message = plain.json["error"]["message"]
        assert message.split("'")[0] in page.body.decode() and "<script" not in page.body.decode()
        assert ('href="?"' in page.body.decode()) is ("?" in path)
        assert (await s.request("POST", path, Accept=BROWSER)).json["error"]


def test_what_a_message_has_is_shown_as_text() -> None:
    page = make_error_page(404, "<img src=x onerror=alert(1)> \u202e'\"", {"Allow": "GET"})
    assert isinstance(page.body, bytes) and b"<img" not in page.body and b"\\u202e" in page.body
    assert page.headers["Allow"] == "GET"
