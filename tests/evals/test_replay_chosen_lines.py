"""Lines are run again alone, from the run folder alone, which stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache
from PIL import Image

from mlxrun.evals.replay import choose_lines, describe_plan, make_serial_config, run_lines_again
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.model.load_check import choose
from tests.helpers.batch_fakes import MIXED, Bench, FakeClient, chat, chats, write_job
from tests.helpers.tokenizers import FakeModelInfo


async def finish(folder: Path, lines: list[Any]) -> tuple[Bench, RunFolder]:
    bench = Bench(write_job(folder, lines))
    await bench.run()
    bench.client = FakeClient(bench.model_info)
    return bench, RunFolder.open(bench.paths.out)


def list_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_lines_are_run_again_one_at_a_time(tmp_path: Path) -> None:
    """With their own ids, seeds, choices and images, and without a trace in the run folder."""
    lines = [*MIXED, chat("several", "hello", n=3, logprobs=True, top_logprobs=2), *chats(12)]
    bench, run = await finish(tmp_path, lines)
    files = list_files(tmp_path)
    numbers = choose_lines(run, None, 0)
    assert numbers == [1, 6, *range(8, 21)]  # those that were answered
    found = await run_lines_again(run, numbers, bench.make_setup(), bench.said.append)
    assert (found.compared, found.differing) == (15, [])
    assert list_files(tmp_path) == files
    assert bench.client.most == 3  # the choices of one line


async def test_what_will_be_done_is_described(tmp_path: Path) -> None:
    """With the time of the run, where it is known and takes seconds."""
    _, run = await finish(tmp_path, [*MIXED, *chats(30)])
    (work,) = run.manifest["runs"]
    work |= dict.fromkeys(("started", "ended"), "2026-01-01T00:00:00+00:00")
    assert describe_plan([run], 20) == "checks 37 records, then computes 20 of 32 answers again, one by one"
    work["ended"] = "2026-01-01T01:02:03+00:00"
    text = (
        "checks 74 records, then computes 64 of 64 answers again, one by one; the 2 runs took 2:04:06, with "
    )
    assert describe_plan([run, run], None).startswith(text)
    work["ended"] = None
    assert describe_plan([run], None) == "checks the records, then computes all answers again, one by one"
    assert "computes up to 3 answers of each run again" in describe_plan([run, run], 3)


async def test_images_are_found_where_the_job_is(tmp_path: Path) -> None:
    """Their paths are relative to the job, of which the lines that run again are a copy elsewhere."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    content = [image, {"type": "text", "text": "what?"}]
    lines = [{"id": "image", "messages": [{"role": "user", "content": content}]}, *chats(1)]
    bench = Bench(write_job(tmp_path, lines), model_info=FakeModelInfo(vision=True))
    await bench.run()
    run = RunFolder.open(bench.paths.out)
    bench.client = FakeClient(bench.model_info)
    found = await run_lines_again(run, choose_lines(run, None, 0), bench.make_setup(), bench.said.append)
    assert (found.compared, found.differing) == (2, [])


async def test_a_line_that_comes_out_differently_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, run = await finish(tmp_path, chats(6))
    answer = FakeClient.answer_body

    def answer_otherwise(self: FakeClient, request: Any, text: str) -> Any:
        most = 4 if text == "say 3" else request.params.max_tokens
        return answer(self, replace(request, params=replace(request.params, max_tokens=most)), text)

    monkeypatch.setattr(FakeClient, "answer_body", answer_otherwise)
    found = await run_lines_again(run, [2, 4], bench.make_setup(), bench.said.append)
    assert found.compared == 2
    (line,) = found.differing
    assert (line.id, line.number) == ("line-3", 4)
    assert "choices[0].message.content differs from character 4 on: 'say ', was 'say 3" in line.text


async def test_a_line_that_fails_now_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, run = await finish(tmp_path, chats(2))

    def fail(self: FakeClient, request: Any, text: str) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(FakeClient, "answer_body", fail)
    found = await run_lines_again(run, [1], bench.make_setup(), bench.said.append)
    assert [line.text.startswith("it was answered, and fails now") for line in found.differing] == [True]


async def test_a_sample_is_chosen_by_its_seed(tmp_path: Path) -> None:
    _, run = await finish(tmp_path, chats(30))
    first = choose_lines(run, 5, 0)
    assert first == choose_lines(run, 5, 0) == sorted(set(first)) and len(first) == 5
    assert choose_lines(run, 5, 1) != first
    assert choose_lines(run, 99, 0) == list(range(1, 31))


async def test_alone_means_without_batch_and_cache(tmp_path: Path) -> None:
    config = make_serial_config(Bench(tmp_path / "job.jsonl").config)
    assert (config.scheduler.max_running, config.cache.backend) == (1, "none")


@pytest.mark.parametrize("gpu", [False, True])
async def test_lines_of_reproducible_mode_are_run_again_in_steps_of_the_same_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """On a GPU a row rounds as in steps of the configured width, so that one row a step has other bits."""
    monkeypatch.setattr(choose, "uses_gpu", lambda: gpu)
    config = Bench(tmp_path / "job.jsonl").config
    config = replace(config, engine=replace(config.engine, reproducible=True))
    widths = {
        choose._choose_candidate([KVCache()], some, True, False).fixed_width
        for some in (config, make_serial_config(config))
    }
    assert len(widths) == 1 and widths != {1}
