"""A job's prefix cache: its folder, the counters in manifest and status, and the messages to the user."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import CacheSettings, Config, EngineSettings, ModelSettings
from mlxrun.core.errors import EngineDead
from mlxrun.core.request import Request, TokenEvent
from mlxrun.jobs.lines.line_keys import collect_settings, digest_settings
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run import job_cache
from mlxrun.jobs.run.line_answerer import _PromptProgress
from tests.helpers.batch_fakes import Bench, FakeClient, chats, make_config, write_job
from tests.helpers.tokenizers import FakeModelInfo


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    found = JobPaths(write_job(tmp_path, chats(4)))
    found.folder.mkdir()
    return found


def with_cache(**settings: Any) -> Config:
    return replace(make_config(), cache=CacheSettings(**settings))


def test_the_engine_keeps_a_jobs_prefixes_in_its_folder(paths: JobPaths) -> None:
    for config in (with_cache(), with_cache(backend="disk", disk_bytes=5)):
        found = job_cache.choose_engine_config(config, paths.cache)
        assert (found.cache.backend, found.cache.disk_path) == ("disk", str(paths.cache.absolute()))
        assert found == replace(config, cache=found.cache, scheduler=replace(config.scheduler, step_ms=0))
        assert found.cache.disk_bytes == config.cache.disk_bytes and found.cache.intervals_only
    for config in (with_cache(backend="none"), with_cache(backend="disk", disk_path="/mine")):
        config = replace(config, scheduler=replace(config.scheduler, step_ms=50))
        assert job_cache.choose_engine_config(config, paths.cache) is config


def test_a_folder_that_cannot_be_written_stops_no_job(paths: JobPaths) -> None:
    paths.cache.write_bytes(b"a file is in the way")
    found = job_cache.choose_engine_config(with_cache(backend="disk"), paths.cache)
    assert (found.cache.backend, found.cache.disk_path) == ("memory", None)
    job_cache.delete_cache(paths.cache)
    assert paths.cache.exists()  # not a folder of ours


def test_the_form_of_weights_is_a_setting_of_reproducible_runs() -> None:
    """Products of dequantized weights round otherwise; `auto` is the same on all machines of a backend."""
    host, digests = FakeModelInfo(), set()
    for choice in ("auto", "never", "always"):
        model = ModelSettings(dequantize=choice)
        config = replace(make_config(), model=model, engine=EngineSettings(reproducible=True))
        digests.add(digest_settings(collect_settings(config, host)))
        usual = digest_settings(collect_settings(replace(make_config(), model=model), host))
        assert usual == digest_settings(collect_settings(make_config(), host))
    assert len(digests) == 3


def test_what_the_keys_depend_on() -> None:
    """Where prefixes are kept changes no answer; how exactly they are kept does."""
    host = FakeModelInfo()
    plain = digest_settings(collect_settings(make_config(), host))
    for settings in ({"backend": "none"}, {"checkpoint_every": 64}, {"backend": "disk"}, {"memory_bytes": 9}):
        assert digest_settings(collect_settings(with_cache(**settings), host)) == plain
    assert digest_settings(collect_settings(with_cache(stored_bits=8), host)) != plain
    assert digest_settings(collect_settings(with_cache(stored_bits=8, backend="none"), host)) == plain


async def test_the_folder_goes_with_the_last_line(paths: JobPaths) -> None:
    bench = Bench(paths.job)
    record = paths.cache / "0123" / "chunk"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"x")
    await bench.run(limit=2)
    assert record.exists()
    await bench.run()
    assert not paths.cache.exists()
    record.parent.mkdir(parents=True)
    record.write_bytes(b"x")
    await bench.run(fresh=True, limit=1)
    assert not paths.cache.exists()


async def test_an_interrupted_job_keeps_it(paths: JobPaths) -> None:
    bench = Bench(write_job(paths.job.parent, [*chats(3), {"id": "d", "prompt": "DEAD now"}]))
    paths.cache.mkdir()
    with pytest.raises(EngineDead):
        await bench.run()
    assert paths.cache.exists()


def count(client: FakeClient, **counts: int) -> None:
    client.counts.update(counts)


async def test_counters_in_manifest_and_status(paths: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the runs, of bytes the most; an engine that was never started counts nothing."""
    bench = Bench(paths.job, make_config(concurrency=1))
    init = FakeClient.__init__

    def counting(self: FakeClient, *args: Any) -> None:
        init(self, *args)
        count(self, exact=1, lcp=2, tokens=50, evicted=3, memory_bytes=700, disk_bytes=10, written=5)

    monkeypatch.setattr(FakeClient, "__init__", counting)
    await bench.run(limit=3)
    await bench.run()
    await bench.run()
    found = json.loads(paths.manifest.read_text())
    assert found["cache"] == {
        "hits": {"exact": 2, "prefix": 0, "supersequence": 0, "lcp": 4, "miss": 4},
        "tokens": 100,
        "evicted": 6,
        "evicted_disk": 0,
        "refused": 0,
        "memory_bytes": 700,
        "disk_bytes": 10,
    }
    assert [run["cache"]["hits"]["miss"] for run in found["runs"]] == [3, 1, 0]
    assert found["runs"][2]["cache"] == job_cache.summarize_counters({})
    assert json.loads(paths.status.read_text())["cache"] == job_cache.summarize_counters({})


async def test_a_killed_run_is_counted_as_last_seen(paths: JobPaths) -> None:
    bench = Bench(paths.job)
    await bench.run(limit=1)
    manifest, status = (json.loads(path.read_text()) for path in (paths.manifest, paths.status))
    manifest["runs"][0]["ended"] = None
    status["cache"]["hits"]["prefix"] = 7
    paths.manifest.write_text(json.dumps(manifest))
    paths.status.write_text(json.dumps(status))
    await bench.run(limit=2)
    runs = json.loads(paths.manifest.read_text())["runs"]
    assert [run["cache"]["hits"]["prefix"] for run in runs] == [7, 0]


@pytest.mark.parametrize("junk", [None, 3, {}, {"hits": []}, {"hits": {"exact": "x"}, "tokens": None}])
async def test_a_manifest_from_before_or_edited(paths: JobPaths, junk: Any) -> None:
    bench = Bench(paths.job)
    await bench.run(limit=1)
    manifest = json.loads(paths.manifest.read_text())
    manifest["runs"][0]["cache"] = junk
    paths.manifest.write_text(json.dumps(manifest))
    await bench.run()
    found = json.loads(paths.manifest.read_text())
    assert found["runs"][0]["cache"] == job_cache.summarize_counters({})
    assert found["cache"] == found["runs"][1]["cache"]


def test_reused_tokens_are_told_apart() -> None:
    """What a prompt computes again after a preemption counts once, and nothing is ever taken back."""
    prompt = _PromptProgress()
    events = [(0, 0), (48, 32), (64, 32), (16, 32), (100, 32), (40, 90), (100, 90)]
    progress = [
        prompt.take_progress(TokenEvent("r", num_computed_tokens=c, num_cached_tokens=k)) for c, k in events
    ]
    assert progress == [(0, 0), (16, 32), (16, 0), (0, 0), (36, 0), (0, 0), (0, 0)]


async def test_reused_tokens_reach_manifest_and_meter(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(self: FakeClient, request: Request, text: str) -> Any:
        size = len(request.prompt)
        yield TokenEvent(request.id, num_computed_tokens=size - 2, num_cached_tokens=size - 5)
        async for event in plain(self, request, text):
            yield event

    plain = FakeClient.answer_body
    monkeypatch.setattr(FakeClient, "answer_body", answer)
    bench = Bench(paths.job)
    outcome = await bench.run()
    found = json.loads(paths.manifest.read_text())
    assert found["tokens"]["computed"] == 4 * 5
    assert found["tokens"]["computed"] + found["tokens"]["reused"] == found["tokens"]["prompt"]
    assert outcome.meter.cached_share > 0.5
