"""A process that tokenizes a huge text: it ends with its caller, and its failure is an error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.text.tokens import tokenize_process
from mlxrun.api.text.tokens.tokenize_process import tokenize_in_process
from mlxrun.core.errors import InternalError
from mlxrun.core.workers import Lane
from tests.helpers.tokenizers import byte_tokenizer, ids_of

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started from now on."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(tokenize_process.subprocess, "Popen", start)
    return found


def test_the_tokens_of_a_text() -> None:
    """With an option of the backend that tokenizer.json does not have: special tokens as ordinary text."""
    tokenizer, text = byte_tokenizer(), "hello <|im_end|> \u0159\U0001f600"
    assert tokenize_in_process(tokenizer, text, add_special_tokens=False) == (ids_of(text), ((2, 6),))
    tokenizer.backend_tokenizer.encode_special_tokens = True
    try:
        expected = tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        found = tokenize_in_process(tokenizer, text, add_special_tokens=False)
        assert found == (expected, ()) and len(expected) > len(ids_of(text))
    finally:
        tokenizer.backend_tokenizer.encode_special_tokens = False


async def test_it_ends_with_its_caller(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(tokenize_process, "serialize", lambda backend: b"")
    start = tokenize_process.subprocess.Popen
    monkeypatch.setattr(
        tokenize_process.subprocess, "Popen", lambda command, **options: start(SLEEPS, **options)
    )
    work = Lane("test", 1).run(tokenize_in_process, byte_tokenizer(), "hello", add_special_tokens=False)
    task = asyncio.create_task(work)
    async with asyncio.timeout(60):
        while not started:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert started[0].returncode is not None and started[0].returncode < 0


def test_files_of_the_current_folder_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizers.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    found = tokenize_in_process(byte_tokenizer(), "hello", add_special_tokens=False)
    assert found == (ids_of("hello"), ())


def test_a_text_that_fits_into_no_pipe() -> None:
    text = "hello world " * 50_000
    assert tokenize_in_process(byte_tokenizer(), text, add_special_tokens=False) == (ids_of(text), ())


def test_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_process, "serialize", lambda backend: b"{")
    with pytest.raises(InternalError, match="could not be tokenized"):
        tokenize_in_process(byte_tokenizer(), "hello", add_special_tokens=False)
