"""`read_form` is tested with the endpoints that use it: test_files.py and test_transcriptions.py."""

from __future__ import annotations

import pytest

from mlxrun.server.http.forms import find_form_field

BODY = (
    b'--a-b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\nname="model"\r\n\r\nx\r\n'
    b'--a-b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--a-b--\r\n'
)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("multipart/form-data; boundary=a-b", "model", "whisper"),
        ('multipart/form-data; boundary="a-b"; charset=utf-8', "model", "whisper"),
        ("multipart/form-data; boundary=a-b", "language", None),
        ("multipart/form-data; boundary=other", "model", None),
        ("multipart/form-data", "model", None),
    ],
)
def test_a_field_of_a_form_is_found(kind: str, name: str, value: str | None) -> None:
    assert find_form_field(BODY, kind, name) == value
