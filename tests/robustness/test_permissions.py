"""Folders that may not be read or written, that are missing or removed, and full devices: each command ends
with a sentence that names the place, and a server refuses only the requests that need it."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.batch_fakes import by_id
from tests.helpers.command_processes import (
    PATIENCE,
    RunningCommand,
    read_log,
    run_program,
    run_serve,
    start_command,
)
from tests.helpers.storm_counts import count

FULL = Path("/dev/full")


def write_small_job(folder: Path) -> Path:
    lines = [{"id": f"line-{at}", "prompt": f"Once {at}", "max_tokens": 4} for at in range(3)]
    path = folder / "job.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@contextmanager
def set_mode(path: Path, mode: int) -> Iterator[None]:
    """The permissions of a file or folder meanwhile."""
    before = path.stat().st_mode & 0o777
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def run(log: Path, *arguments: str, **environ: str | None) -> tuple[int, str]:
    """The exit code of a command for which permissions hold, and what it printed last."""
    before = len(read_log(log))
    process = start_command(log, *arguments, plain_user=True, **environ)
    try:
        code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    said = read_log(log)[before:]
    assert "Traceback" not in said and "this is a bug" not in said, said
    count("commands without permission")
    return code, said.splitlines()[-1]


@pytest.mark.parametrize("mode", [0o000, 0o500], ids=oct)
def test_the_folder_of_a_job(tmp_path: Path, mode: int) -> None:
    """Nothing of it may be read, or nothing may be written into it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    job = write_small_job(folder)
    with set_mode(folder, mode):
        code, said = run(tmp_path, "batch", str(job))
    place = folder / ("job.out.jsonl: the output" if mode == 0 else "job.out.jsonl.run:")
    assert (code, said) == (2, f"mlxrun: {place} cannot be written: Permission denied")
    assert [path.name for path in folder.iterdir()] == ["job.jsonl"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["", "lock", "journal.jsonl"])
def test_the_run_folder_of_a_job(tmp_path: Path, name: str) -> None:
    """With it, the same command goes on, and what was finished is unchanged."""
    job = write_small_job(tmp_path)
    out, folder = tmp_path / "job.out.jsonl", tmp_path / "job.out.jsonl.run"
    assert run(tmp_path, "batch", str(job), "--limit", "1")[0] == 0
    first = out.read_bytes()
    with set_mode(folder / name if name else folder, 0o000):
        code, said = run(tmp_path, "batch", str(job))
    assert code == 2 and "Permission denied" in said and str(folder) in said
    assert out.read_bytes() == first
    assert run(tmp_path, "batch", str(job))[0] == 0
    assert len(by_id(out)) == 3 and out.read_bytes().startswith(first)


@pytest.mark.parametrize(
    "arguments", [["batch"], pytest.param(["doctor"], marks=pytest.mark.sweep)], ids=lambda given: given[0]
)
def test_a_working_directory_that_was_removed(tmp_path: Path, arguments: list[str]) -> None:
    if arguments == ["batch"]:
        arguments = ["batch", str(write_small_job(tmp_path))]
    code = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
    code += f"sys.argv[1:] = {arguments!r}; from mlxrun.cli.main import main; sys.exit(main())"
    done = run_program([sys.executable, "-c", code], cwd=tmp_path)
    said = "mlxrun: the working directory has been removed; change to another one"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)


@pytest.mark.skipif(not FULL.exists(), reason="there is no full device here")
@pytest.mark.parametrize(
    "arguments", [["config", "show"], pytest.param(["doctor"], marks=pytest.mark.sweep)], ids=" ".join
)
def test_standard_output_on_a_full_disk(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mlxrun", *arguments]
    with FULL.open("w") as full:
        done = run_program(command, stdout=full, cwd=tmp_path)
    said = "mlxrun: standard output: No space left on device"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, said)
    assert done.stderr.count(said) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["read-only", "missing"])
def test_the_folder_for_temporary_files(tmp_path: Path, kind: str) -> None:
    """Where MLX compiles code: without it nothing is computed."""
    job, folder = write_small_job(tmp_path), tmp_path / "temporary"
    if kind == "read-only":
        folder.mkdir(mode=0o500)
    code, said = run(tmp_path, "batch", str(job), TMPDIR=str(folder))
    assert code == 3 and f"MLX compiles code in {folder}" in said
    assert run(tmp_path, "batch", str(job))[0] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("home", ["read-only", "missing", "", None], ids=str)
def test_the_home_folder(tmp_path: Path, home: str | None) -> None:
    """A job needs none."""
    (tmp_path / "read-only").mkdir(mode=0o500)
    place = str(tmp_path / home) if home else home
    job = write_small_job(tmp_path)
    given = {"HOME": place, "XDG_CACHE_HOME": None, "XDG_DATA_HOME": None}
    assert run(tmp_path, "batch", str(job), **given)[0] == 0
    assert len(by_id(tmp_path / "job.out.jsonl")) == 3


def ask(
    server: RunningCommand, method: str, path: str, body: Any = None, kind: str = "application/json"
) -> Any:
    """The status of a request, and what was answered."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(*server.address, timeout=240)) as connection:
        connection.request(method, path, data, {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def upload(server: RunningCommand) -> Any:
    head = "--x\r\nContent-Disposition: form-data; name="
    form = f'{head}"purpose"\r\n\r\nbatch\r\n{head}"file"; filename="a.jsonl"\r\n\r\n{{}}\n\r\n--x--\r\n'
    return ask(server, "POST", "/v1/files", form.encode(), "multipart/form-data; boundary=x")


@pytest.mark.sweep
@pytest.mark.parametrize("mode", [0o000, 0o500], ids=oct)
def test_folders_of_a_server(tmp_path: Path, mode: int) -> None:
    """They can be used no more in the middle of its work: only what needs them is refused, by their name."""
    cache, body = tmp_path / "cache", {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    sets = ("cache.backend=disk", f"cache.disk_path={cache}")

    def read_text() -> str:
        status, answer = ask(server, "POST", "/v1/completions", body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    with run_serve(tmp_path, *sets, plain_user=True) as server, ExitStack() as opened:
        wanted, (status, file) = read_text(), upload(server)
        assert status == 200, file
        for folder in sorted((tmp_path / "data", *tmp_path.glob("data/*/"), cache, *cache.glob("*/")))[::-1]:
            opened.enter_context(set_mode(folder, mode))
        assert read_text() == wanted
        status, answer = upload(server)
        assert status == 503 and str(tmp_path / "data") in answer["error"]["message"]
        assert ask(server, "DELETE", f"/v1/files/{file['id']}")[0] == 503
        opened.close()
        assert upload(server)[0] == 200
        assert [each["id"] for each in ask(server, "GET", "/v1/files")[1]["data"]][1] == file["id"]
        assert read_text() == wanted
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in read_log(tmp_path)
