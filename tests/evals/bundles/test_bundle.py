"""What is in a bundle, what cannot be in one, and what is done with those of others."""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import EngineSettings, ModelSettings
from mlxrun.core.errors import JobError
from mlxrun.evals.bundles.archive import read_sums, write_archive
from mlxrun.evals.bundles.bundle import _get_name, is_bundle, open_bundle, write_bundle
from mlxrun.evals.bundles.readme import render_readme
from mlxrun.evals.replay import rebuild_config, run_lines_again
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.agent_bench import (
    COUNTER,
    AgentBench,
    AgentSuiteBench,
    agent_line,
    answer_in_turn,
    call,
    write_tools,
)
from tests.helpers.batch_fakes import Bench, chat, chats, write_job
from tests.helpers.suite_bench import SuiteBench
from tests.helpers.suite_files import CAPITALS, write_suite


def show(custom_id: str, *urls: str) -> dict[str, Any]:
    """A line with images."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    line = chat(custom_id, "")
    line["body"]["messages"][0]["content"] = [*parts, {"type": "text", "text": "What is it?"}]
    return line


async def finish(folder: Path, lines: list[Any], **model: Any) -> Bench:
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(write_job(folder, lines))
    media = replace(bench.config.media, roots=(str(folder.parent),))
    bench.config = replace(bench.config, model=ModelSettings(**model), media=media)
    await bench.run()
    return bench


def list_names(path: Path) -> set[str]:
    """The files that a bundle unpacks."""
    with open_bundle(path) as runs:
        top = next(each for each in runs[0].paths.out.parents if (each / "README.md").exists())
        return {str(each.relative_to(top)) for each in top.rglob("*") if each.is_file()}


@pytest.mark.parametrize("exact", [True, False])
async def test_the_readme_promises_equal_bytes_of_reproducible_runs_only(tmp_path: Path, exact: bool) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    bench.config = replace(bench.config, engine=EngineSettings(reproducible=exact))
    await bench.run()
    text = render_readme("x", [RunFolder.open(bench.job)])
    assert ("To repeat them, byte for byte:" in text) is exact and f"| {'yes' if exact else 'no'} |" in text
    assert ("Runs that are not reproducible" in text) is not exact


async def test_everything_of_a_run_is_where_it_was(tmp_path: Path) -> None:
    """Images and the chat template too, so that the paths of the job lead to them."""
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(b"pixels")
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    lines = [*chats(3), show("seen", "../images/a.png", "../images/missing.png"), "no JSON"]
    bench = await finish(tmp_path / "jobs", lines, chat_template=str(template))
    path = write_bundle(bench.job, None)
    assert path == tmp_path / "jobs/job.tar.gz" and is_bundle(path)
    assert list_names(path) == {
        "README.md",
        "SHA256SUMS",
        "environment.txt",
        "files/images/a.png",
        "files/jobs/job.errors.jsonl",
        "files/jobs/job.jsonl",
        "files/jobs/job.out.jsonl",
        "files/jobs/job.out.jsonl.run/journal.jsonl",
        "files/jobs/job.out.jsonl.run/manifest.json",
        "files/jobs/job.out.jsonl.run/scores.json",
        "files/jobs/job.out.jsonl.run/timings.jsonl",
        "files/jobs/t.jinja",
    }
    template.unlink()  # as on another machine
    with open_bundle(path) as (run,):
        assert run.name == str(path) and run.check() == []
        assert run.paths.job.read_bytes() == bench.job.read_bytes()
        config = rebuild_config(run)
        assert config.model.chat_template == str(run.paths.job.parent / "t.jinja")
        assert config.media.roots == (str(run.paths.job.parents[1]),)
        text = (run.paths.job.parents[2] / "environment.txt").read_text()
        assert "\nnumpy==" in text and text.startswith("# Python 3.")
        assert "| 5 | " in (run.paths.job.parents[2] / "README.md").read_text()
    first = path.read_bytes()
    with pytest.raises(JobError, match="the chat template of its config is missing"):
        write_bundle(bench.job, None)
    template.write_text("{{ messages }}")
    assert write_bundle(bench.job, None).read_bytes() == first


async def test_an_image_beside_a_folder_that_a_link_names(tmp_path: Path) -> None:
    """`..` leads out of the folder itself, not out of the folder with the link."""
    jobs, link = tmp_path / "real/jobs", tmp_path / "link"
    for folder, pixels in ((tmp_path, b"wrong"), (jobs.parent, b"right")):
        (folder / "images").mkdir(parents=True)
        (folder / "images/a.png").write_bytes(pixels)
    jobs.mkdir()
    link.symlink_to(jobs)
    bench = Bench(write_job(link, [show("seen", "../images/a.png")]))
    bench.config = replace(bench.config, media=replace(bench.config.media, roots=("..",)))
    await bench.run()
    with open_bundle(write_bundle(bench.job, tmp_path / "b.tar.gz")) as (run,):
        assert run.check() == []
        assert (run.paths.job.parent / "../images/a.png").read_bytes() == b"right"


async def test_a_suite_is_one_bundle(tmp_path: Path) -> None:
    bench = SuiteBench(write_suite(tmp_path, CAPITALS + "    seeds: [1, 2]\n"))
    assert await bench.run() == 0
    path = write_bundle(bench.path, None)
    assert path == tmp_path / "suite.tar.gz"
    names = list_names(path)
    assert {"files/suite.yaml", "files/suite.out/suite.json"} <= names
    with open_bundle(path, tmp_path / "kept") as runs:
        assert [run.name for run in runs] == [
            f"{path}: suite.out/tiny/capitals/seed-{seed}" for seed in (1, 2)
        ]
        assert all(run.check() == [] for run in runs)
    bench.path.write_text("# edited since\n" + bench.path.read_text())
    assert "files/suite.yaml" not in list_names(write_bundle(bench.folder, tmp_path / "b.tar.gz"))


async def test_a_suite_of_one_cell_is_bundled_beside_its_folder(tmp_path: Path) -> None:
    bench = SuiteBench(write_suite(tmp_path, CAPITALS))
    assert await bench.run() == 0
    for path in (bench.path, bench.folder):
        assert write_bundle(path, None) == tmp_path / "suite.tar.gz"
    cell = bench.folder / "tiny/capitals/seed-0"
    assert write_bundle(cell, None) == cell / "job.tar.gz"


async def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.png").write_bytes(b"pixels")
    for name, url, says in (
        ("absolute", str(tmp_path / "other/a.png"), r"line 'x' names '/.+/a\.png' by an absolute path"),
        ("outside", "../../other/a.png", r"line 'x' names '../../other/a\.png' outside media\.roots"),
    ):
        bench = await finish(tmp_path / name / "jobs", [show("x", url)])
        with pytest.raises(JobError, match=says):
            write_bundle(bench.job, None)


async def test_a_run_is_finished_and_as_it_was_written(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run(limit=2)
    with pytest.raises(JobError, match="the run is unfinished; a bundle is made of a finished run"):
        write_bundle(bench.job, None)
    await bench.run()
    with pytest.raises(JobError, match=r"a bundle is a file whose name ends in \.tar\.gz"):
        write_bundle(bench.job, tmp_path / "run.tar.zst")
    with pytest.raises(JobError, match=r"the name of a bundle ends in \.tar\.gz"):
        write_bundle(bench.job, tmp_path / "run")
    bench.paths.out.write_bytes(bench.paths.out.read_bytes().replace(b"say 2", b"say 3"))
    with pytest.raises(JobError, match="it is not as it was written: .*was edited or damaged"):
        write_bundle(bench.job, None)
    assert not list(tmp_path.glob("*.tar.gz"))


async def test_a_kept_folder_is_that_of_the_bundle(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run()
    path, kept = write_bundle(bench.job, None), tmp_path / "kept"
    for _ in range(2):  # the second start uses what the first one has unpacked
        with open_bundle(path, kept) as (run,):
            (run.paths.job.parent / "mine").write_text("a replay")
    assert [each.name for each in tmp_path.glob(".mlxrun-*")] == []
    (kept / "files/job.out.jsonl").write_text("")
    with (
        pytest.raises(JobError, match="is there already, and is not this bundle as it was unpacked"),
        open_bundle(path, kept),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "said"),
    [(None, "its config must be an object, not null"), ({"model": []}, "its model must be")],
)
async def test_a_damaged_config_is_named_in_its_bundle(tmp_path: Path, config: Any, said: str) -> None:
    """And not in the temporary folder."""
    bench = await finish(tmp_path / "jobs", chats(2))
    manifest = json.loads(bench.paths.manifest.read_text())
    path = write_bundle(bench.job, None)
    with open_bundle(path, tmp_path / "kept") as (run,):
        name = _get_name(run, tmp_path / "kept")
    files: dict[str, Path | bytes] = {
        each: tmp_path / "kept" / each for each in read_sums(tmp_path / "kept")
    } | {name: json.dumps(manifest | {"config": config}).encode()}
    write_archive(path, "run", files)
    text = f"{path}: {name}: contains no config that can be used: {said}"
    with pytest.raises(JobError, match=f"^{re.escape(text)}"), open_bundle(path):
        pass


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(1)))
    await bench.run()
    path = write_bundle(bench.job, None)
    with (
        pytest.raises(JobError, match="none: cannot be written: No such file or directory$"),
        open_bundle(path, tmp_path / "none" / "kept"),
    ):
        pass


async def test_code_of_somebody_elses_model_is_not_run(tmp_path: Path) -> None:
    bench = await finish(tmp_path / "jobs", chats(2), trust_remote_code=True)
    path = write_bundle(bench.job, None)
    with pytest.raises(JobError, match=r"its config has model\.trust_remote_code"), open_bundle(path):
        pass
    manifest = json.loads(bench.paths.manifest.read_text())
    assert manifest["config"]["model"]["trust_remote_code"] is True


async def test_tools_travel_and_those_of_somebody_else_do_not_run(tmp_path: Path) -> None:
    """The unpacked folder is verified as any run, with the tools at the same place relative to the job."""
    for name in ("suite", "suite/out"):
        (tmp_path / name).mkdir()
    write_tools(tmp_path / "suite")
    job = write_job(tmp_path / "suite/out", [agent_line(folder="..")])
    bench = AgentBench(job, script=answer_in_turn(call("add", number=2), "Two."))
    await bench.run()
    path = write_bundle(job, tmp_path / "run.tar.gz")
    with (
        pytest.raises(JobError, match="its lines have tools, which would run"),
        open_bundle(path, None, []),
    ):
        pass
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert (tmp_path / "there/run/files/tools.py").is_file()
    bench.job = tmp_path / "there/run/files/out/job.jsonl"
    found = await run_lines_again(RunFolder.open(bench.job), [1], bench.make_setup(), lambda text: None)
    assert (found.compared, found.differing) == (1, [])
    write_tools(bench.job.parent.parent, COUNTER.replace("+ number", "- number"))
    found = await run_lines_again(RunFolder.open(bench.job), [1], bench.make_setup(), lambda text: None)
    assert "transcript[1].content" in str(found.differing[0])


HELPED = """
from pathlib import Path

from helpers.words import greet

def hello(who: str) -> str:
    return greet(who) + Path(__file__).with_name("data").joinpath("end.txt").read_text()
"""
HELPED_SUITE = """\
models: {tiny: }
tasks:
  hellos:
    rows: [{name: Ann, hello: Hello Ann!}]
    prompt: "Greet {{ name }}."
    expected: hello
    agent: {tools: [tools.py:hello], files: [data]}
"""


def write_helped_suite(folder: Path) -> AgentSuiteBench:
    for name, text in (
        ("helpers/words.py", "def greet(name):\n    return 'Hello ' + name\n"),
        ("data/end.txt", "!"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    script = answer_in_turn(call("hello", who="Ann"), "Hello Ann!")
    return AgentSuiteBench(write_suite(folder, HELPED_SUITE, tools_py=HELPED), script=script)


async def test_what_tools_import_and_read_travels_with_checksums(tmp_path: Path) -> None:
    bench = write_helped_suite(tmp_path)
    assert await bench.run() == 0
    job = bench.folder / "tiny/hellos/seed-0/job.jsonl"
    line = json.loads(job.read_text())
    names = {"tools.py", "helpers/words.py", "data/end.txt"}
    assert line["agent"]["digests"].keys() == names
    record = RunFolder.open(job).read_lines().__next__().record
    assert record["transcript"][1]["content"] == "Hello Ann!"
    path = write_bundle(bench.folder, None)
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    found = {
        each.removeprefix("files/")
        for each in read_sums(tmp_path / "there" / path.name.removesuffix(".tar.gz"))
    }
    assert names <= found and not any("__pycache__" in each for each in found)


@pytest.mark.parametrize("name", ["helpers/words.py", "data/end.txt"])
async def test_a_helper_that_has_changed_is_noticed(tmp_path: Path, name: str) -> None:
    """A bundle of its run is refused, and the next start makes the lines anew."""
    bench = write_helped_suite(tmp_path)
    await bench.run()
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    with pytest.raises(JobError, match=f"{name}, a file of its tools, has changed since the run"):
        write_bundle(bench.folder, None)
    bench.prompts.clear()
    assert await bench.run() == 0 and len(bench.prompts) == 2
    write_bundle(bench.folder, None)
