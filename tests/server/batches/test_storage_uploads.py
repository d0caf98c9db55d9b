"""The description of a file, its type, and its content as it is received."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai.types import FileObject

from mlxrun.core.errors import BodyTooLarge
from mlxrun.server.batches.storage import StoredFile, Upload, guess_media_type


def test_what_clients_see() -> None:
    """OpenAI's fields and no others."""
    file = StoredFile("file-1", "a.jsonl", 3, 1, "batch", "ann", "text/plain", 9)
    found = file.describe()
    FileObject.model_validate(found, strict=True)
    assert found.keys() <= FileObject.model_fields.keys()
    assert found["expires_at"] == 9 and "owner" not in found


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ("image/png", "a.txt", "image/png"),
        ("text/plain; charset=utf-8", "a", "text/plain; charset=utf-8"),
        ("application/octet-stream", "a.png", "image/png"),
        ("", "a.webp", "image/webp"),
        (None, "notes.txt", "text/plain"),
        ("", "unknown", "application/octet-stream"),
    ],
)
def test_types(given: str | None, name: str, expected: str) -> None:
    """The client's, unless it says nothing; then that of the name."""
    assert guess_media_type(given, name) == expected


def test_expiry() -> None:
    ever, once = (
        StoredFile("file-1", "a", 1, 1, "batch"),
        StoredFile("file-2", "a", 1, 1, "batch", expires_at=9),
    )
    assert not ever.has_expired(10**12)
    assert [once.has_expired(now) for now in (8.9, 9.0, 9.1)] == [False, True, True]


def test_an_upload(tmp_path: Path) -> None:
    """It counts what is received, is complete once it is finished, and is gone once it is discarded."""
    upload = Upload(tmp_path / "a.part", 5)
    upload.receive(3)
    upload.write(b"abc")
    upload.finish()
    assert (tmp_path / "a.part").read_bytes() == b"abc"
    upload.check(2)
    with pytest.raises(BodyTooLarge, match="more than 5 bytes"):
        upload.check(3)
    with pytest.raises(BodyTooLarge):
        upload.receive(3)
    upload.discard()
    upload.discard()
    assert not list(tmp_path.iterdir())
