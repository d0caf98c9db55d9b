"""A run goes to somebody else: another home, folder, name of the model and number of threads. The bytes are
the same, or the cause is named before lines are counted."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mlxrun.model
from tests.helpers.batch_fakes import write_job
from tests.helpers.command_processes import read_log, start_command
from tests.helpers.model_fixtures import mark_sweep

pytestmark = pytest.mark.thorough

EMBEDDED = Path(mlxrun.model.__file__).parent / "embedded/model"
SEEN = [
    {"type": "image_url", "image_url": {"url": "../images/a.png"}},
    {"type": "text", "text": "What colour is it?"},
]
LINES: list[Any] = [
    {"id": "sum", "messages": [{"role": "user", "content": "What is 12 + 30?"}], "logprobs": True},
    {"id": "hot", "messages": [{"role": "user", "content": "Say something."}], "temperature": 1},
    {"id": "seen", "messages": [{"role": "user", "content": SEEN}]},
    {"id": "text", "prompt": "Once upon a time", "temperature": 1, "logprobs": 2},
    {"id": "named", "model": "mine", "prompt": ["2 + 3 = 5", "2 + 3 = 6"], "echo": True, "logprobs": 1},
    "no JSON",
]
# An engine whose answers depend on who runs it.
PLANTED = """
import os, mlxrun.jobs.run.line_answerer as answerer
derive = answerer.derive_line_seed
answerer.derive_line_seed = lambda base, name: derive(base, name + os.environ["HOME"])
"""


def call(folder: Path, *arguments: str, before: str = "", **environ: str) -> tuple[int | None, str]:
    """Run a command in a folder, with a home of its own; its exit code, and what it prints."""
    (folder / "log").unlink(missing_ok=True)
    (folder / "home").mkdir(exist_ok=True)
    home = {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    code = start_command(folder, *arguments, before=before, **{**home, **environ}).wait(timeout=240)
    return code, read_log(folder)


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with the bundle of a run and, below `copy`, a copy of its folders; and the model under another
    name. Nothing is left where the run was."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there") / "deeper"
    (here / "jobs").mkdir()
    (here / "images").mkdir()
    Image.new("RGB", (24, 24), "red").save(here / "images/a.png")
    shutil.copytree(EMBEDDED, here / "models/first-name")
    lines = [line if isinstance(line, str) else {**line, "max_tokens": 6} for line in LINES]
    job = write_job(here / "jobs", lines)
    sets = (
        "engine.reproducible=true",
        f"model.path={here}/models/first-name",
        f"media.roots=['{here}/images']",
    )
    code, log = call(here, "batch", str(job), *(part for each in sets for part in ("--set", each)))
    assert code == 1 and "5 of 6 lines done" in log, log
    assert call(here, "bundle", str(job))[0] == 0
    there.mkdir()
    shutil.move(here / "jobs/job.tar.gz", there / "run.tar.gz")
    shutil.copytree(here / "jobs", there / "copy/jobs")
    shutil.copytree(here / "images", there / "copy/images")
    shutil.move(here / "models/first-name", there / "weights-of-somebody")
    shutil.rmtree(here)
    return there, there / "weights-of-somebody"


@pytest.mark.parametrize(
    ("threads", "name"),
    mark_sweep(itertools.product("12", ("run.tar.gz", "copy")), [("1", "copy"), ("2", "run.tar.gz")]),
)
def test_the_bytes_are_the_same(travelled: tuple[Path, Path], name: str, threads: str) -> None:
    """Of the bundle, and of the run folder as it was copied."""
    folder, model = travelled
    environ = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    path = folder / ("copy/jobs/job.jsonl" if name == "copy" else name)
    code, log = call(folder, "verify", str(path), "--sample", "4", "--model", str(model), **environ)
    assert code == 0 and "4 equal, 0 different" in log, log
    out = folder / f"{name}-{threads}.out.jsonl"
    code, log = call(folder, "replay", str(path), "-o", str(out), "--model", str(model), **environ)
    assert code == 0 and "6 of 6 records equal, byte for byte" in log, log
    old = (folder / "copy/jobs/job.out.jsonl").read_bytes().splitlines()
    assert sorted(out.read_bytes().splitlines()) == sorted(old)


def test_an_answer_that_depends_on_the_machine_is_found(travelled: tuple[Path, Path]) -> None:
    """The twin."""
    folder, model = travelled
    path = folder / "copy/jobs/job.jsonl"
    code, log = call(folder, "verify", str(path), "--all", "--model", str(model), before=PLANTED)
    assert (
        code == 1 and "line 'hot' (line 2 of the job): " in log and "versions, device and BLAS are" in log
    ), log


def test_the_cause_comes_before_the_count(travelled: tuple[Path, Path]) -> None:
    """Where MLX is told not to compile, or has other variables."""
    folder, model = travelled
    environ = {"MLX_DISABLE_COMPILE": "1", "MLX_MAX_OPS_PER_BUFFER": "5"}
    path = folder / "copy/jobs/job.jsonl"
    manifest = json.loads((folder / "copy/jobs/job.out.jsonl.run/manifest.json").read_text())
    _, log = call(folder, "verify", str(path), "--sample", "1", "--model", str(model), **environ)
    places = [
        log.find("the variable MLX_MAX_OPS_PER_BUFFER is '5', was not set"),
        log.find(" run again, alone"),
    ]
    if manifest["device"]["compile"]:  # else there is no compiler here
        places.insert(0, log.find("compiling (MLX_DISABLE_COMPILE, or g++ on a CPU) is off, was on"))
    assert places == sorted(places) and -1 not in places, log
