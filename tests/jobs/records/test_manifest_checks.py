"""Whose output it is, and which changes of settings ask for a decision."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import SamplingSettings, StructuredSettings
from mlxrun.core.errors import JobError
from tests.helpers.batch_fakes import Bench, by_id, chats, finish_job, write_job
from tests.helpers.tokenizers import DIGESTS, FakeModelInfo


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda bench: replace(bench.config, sampling=SamplingSettings(temperature=0.5)),
            "sampling.temperature is 0.5, was null",
        ),
        (
            lambda bench: setattr(bench, "model_info", FakeModelInfo(digests={**DIGESTS, "model": "other"})),
            "model.path is embedded, was the same path with other files",
        ),
        (
            lambda bench: setattr(bench, "model_info", FakeModelInfo(digests={**DIGESTS, "template": "o"})),
            "the chat template has changed",
        ),
        (
            lambda bench: (
                setattr(bench, "model_info", FakeModelInfo(digests={**DIGESTS, "model": "other"}))
                or replace(bench.config, structured=StructuredSettings(close_objects=True))
            ),
            "model.path is embedded, was the same path with other files; "
            "structured.close_objects is true, was null",
        ),
    ],
)
async def test_another_model_or_setting_needs_a_decision(tmp_path: Path, change: Any, says: str) -> None:
    """Answers of two models never mix in one output, and no answer is moved away without --fresh."""
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run(limit=2)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    old = by_id(bench.paths.out)
    bench.config = change(bench) or bench.config
    with pytest.raises(JobError) as caught:
        await bench.run()
    assert caught.value.exit_code == 2
    assert f"computed with other settings ({says}); give another -o" in str(caught.value)
    assert bench.ran == 0 and {path: path.read_bytes() for path in files} == files
    await bench.run(fresh=True)
    assert bench.ran == 4 and len(by_id(bench.paths.out)) == 4
    (folder,) = bench.paths.earlier.iterdir()
    assert by_id(folder / "job.out.jsonl") == old
    assert bench.said == [f"starting over; the earlier answers were moved to {folder}"]


@pytest.mark.parametrize(
    "junk", [None, 3, {}, {"model": 3}, {"model": {"model": 3}}, {"model": {"model": "x"}}]
)
async def test_settings_of_an_old_or_edited_manifest(tmp_path: Path, junk: Any) -> None:
    """The journal alone says that something differs; the same settings go on without the manifest's."""
    bench = await finish_job(tmp_path)
    manifest = json.loads(bench.paths.manifest.read_text())
    bench.paths.manifest.write_text(json.dumps({**manifest, "settings": junk}))
    assert (await bench.run()).meter.done == 12 and bench.ran == 0
    bench.paths.manifest.write_text(json.dumps({**manifest, "settings": junk}))
    bench.config = replace(bench.config, sampling=SamplingSettings(temperature=0.5))
    with pytest.raises(
        JobError, match=r"were computed with other settings \((or on another model|model.path)"
    ):
        await bench.run()


@pytest.mark.parametrize("fresh", [False, True])
async def test_two_outputs_with_one_file_of_errors(tmp_path: Path, fresh: bool) -> None:
    """The second job is refused. Two that were begun by earlier versions go on, unless failed lines of the
    other one would be lost."""
    write_job(tmp_path, ['{"of": "another"}'], "job.errors.jsonl")
    twin = tmp_path / "job.jsonl.run/manifest.json"
    twin.parent.mkdir()
    twin.write_text('{"counts": {"failed": 1}}')
    bench = Bench(write_job(tmp_path, chats(2)))
    for _ in range(2):
        with pytest.raises(JobError, match=r"job\.errors\.jsonl: .* of .*/job\.jsonl, .* give another -o"):
            await bench.run(fresh=fresh)
        bench.paths.folder.mkdir(exist_ok=True)
        bench.paths.manifest.write_text("{}")
    assert bench.paths.errors.read_text() == '{"of": "another"}\n' and bench.ran == 0
    bench.paths.errors.unlink()
    twin.write_text('{"counts": {"failed": 0}}')
    assert (await bench.run(fresh=fresh)).done == 2
