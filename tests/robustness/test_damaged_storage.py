"""The server's folder with documents that are damaged, truncated or somebody else's: they are reported and
left out, and all other files and batches are served as before.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxrun.server.batches import durable_files
from tests.helpers.batch_fakes import chats
from tests.helpers.batches_server import RunningServer, ServerSetup
from tests.helpers.storm_counts import count, make_rng
from tests.robustness.test_server_fuzz_bodies import NASTY

WITHIN = 60  # seconds: a hang, on whatever machine


@dataclass
class Stored:
    """A folder, and the ids of what is in it: two files, a batch that has ended and one that has not."""

    root: Path
    kept: str
    file: str
    ended: str
    begun: str

    @property
    def documents(self) -> list[Path]:
        """Those that are damaged; that of `kept` is not."""
        batches = [self.root / "batches" / name / "batch.json" for name in (self.ended, self.begun)]
        return [self.root / "files" / f"{self.file}.json", *batches]

    def copy_to(self, root: Path) -> Stored:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.root, root)
        return Stored(root, self.kept, self.file, self.ended, self.begun)


@pytest.fixture
async def stored(tmp_path: Path) -> Stored:
    place = ServerSetup(tmp_path / "whole")
    async with place.run() as site:
        kept, file = await site.upload(chats(3)), await site.upload(chats(2))
        ended = (await site.create(file))["id"]
        await site.wait_until_ended(ended)
    place.engine = False
    async with place.run() as site:
        begun = (await site.create(file))["id"]
    return Stored(place.root, kept, file, ended, begun)


def damage(path: Path, rng: random.Random) -> None:
    """A value of another kind, a part of the document, or another byte in it."""
    raw, how = path.read_bytes(), rng.randrange(5)
    if how < 3:
        values = json.loads(raw)
        values[rng.choice(list(values))] = copy.deepcopy(rng.choice((*NASTY, "../files", 10**15)))
        raw = json.dumps(values).encode()
    elif how == 3:
        raw = raw[: rng.randrange(len(raw))]
    else:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    path.write_bytes(raw)
    count("damaged documents of a server's folder")


async def ask_everything(site: RunningServer, stored: Stored) -> None:
    """No 5xx, and what was not damaged is there."""
    received = [("GET", f"/v1/{path}") for path in ("files", "batches", "messages/batches", "status")]
    received += [("GET", f"/v1/files/{stored.file}"), ("GET", f"/v1/files/{stored.file}/content")]
    received += [("GET", f"/v1/batches/{name}") for name in (stored.ended, stored.begun)]
    received += [("POST", f"/v1/batches/{stored.begun}/cancel"), ("GET", "/metrics")]
    received += [("DELETE", f"/v1/files/{stored.file}")]
    for method, path in received:
        async with site.http.request(method, path) as response:
            assert response.status < 500, (method, path, await response.read())
    assert len(await site.records(stored.kept)) == 3


async def serve(stored: Stored) -> None:
    async with asyncio.timeout(WITHIN), ServerSetup(stored.root).run() as site:
        await ask_everything(site, stored)


async def damage_and_serve(stored: Stored, rng: random.Random, root: Path, times: int) -> None:
    for _ in range(times):
        damaged = stored.copy_to(root)
        damage(rng.choice(damaged.documents), rng)
        await serve(damaged)


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    assert [r for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info] == []
    assert all(len(record.getMessage()) < 2000 for record in caplog.records)


@pytest.mark.parametrize(
    ("seed", "times"), [(0, 40), *(pytest.param(seed, 300, marks=pytest.mark.sweep) for seed in range(1, 5))]
)
async def test_damaged_documents(
    stored: Stored, tmp_path: Path, seed: int, times: int, night: int, caplog: pytest.LogCaptureFixture
) -> None:
    await damage_and_serve(stored, make_rng(seed, night), tmp_path / "damaged", times)
    check_log(caplog)


async def test_documents_whose_types_are_not_checked_would_be_seen(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: any value is taken for any field, as it was."""
    monkeypatch.setattr(durable_files, "has_type", lambda value, hint: True)
    with pytest.raises((TypeError, AttributeError, AssertionError)):
        await damage_and_serve(stored, random.Random(0), tmp_path / "damaged", 100)


def put_in_the_way(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
async def test_what_is_no_file(
    stored: Stored, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe, a folder or a device in place of a document; it is not waited for."""
    for document in stored.documents:
        put_in_the_way(document, make)
    put_in_the_way(stored.root / "files" / "x.part", make)
    await serve(stored)
    assert (
        "does not describe an existing file" in caplog.text and "not a batch of this version" in caplog.text
    )
    check_log(caplog)


async def test_what_is_somebody_elses(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    """It stays where it is, and a copy of a batch is none."""
    batches, other = stored.root / "batches", stored.root / "batches" / "batch_copy"
    shutil.copytree(batches / stored.ended, other)
    (batches / "notes").mkdir()
    (batches / "notes" / "mine.txt").write_text("mine")
    (batches / "mine.txt").write_text("mine")
    await serve(stored)
    assert (batches / "notes" / "mine.txt").exists() and (batches / "mine.txt").exists() and other.exists()
    assert f"{other.name}/batch.json: not a batch" in caplog.text
    check_log(caplog)
