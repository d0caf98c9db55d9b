"""Bundles: all files of a run, or of the runs of a suite, as one .tar.gz file that is replayed anywhere.

Below `files/` everything is where it was relative to the others, so that the paths in job lines lead to the
same images. README.md says what it is and how to repeat it. environment.txt has the versions of all packages.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.bundles.archive import SUMS, read_sums, unpack_archive, write_archive
from mlxrun.evals.bundles.readme import render_readme
from mlxrun.evals.judge_run import JUDGE
from mlxrun.evals.replay import find_job, rebuild_config
from mlxrun.evals.run_folders.run_folder import DONE, RunFolder, open_runs
from mlxrun.evals.run_folders.run_folder_paths import (
    BUNDLE_SUFFIX,
    SUITE_NAME,
    find_cell,
    find_suite,
)
from mlxrun.evals.suites.suite_manifest import read_suite_manifest
from mlxrun.jobs.agents.agent_settings import LineAgent, parse_agent
from mlxrun.jobs.agents.tool_process import compute_digest
from mlxrun.jobs.agents.tool_session import list_tool_paths
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.line_keys import find_local_images
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.manifest_checks import list_versions
from mlxrun.jobs.records.run_paths import JobPaths, wrap_write_errors

_OF_TOOLS = ("tools", "mcp", "files", "folder", "digests")
FILES = "files"  # the folder of the runs in a bundle


def is_bundle(path: Path) -> bool:
    """Whether a path names a bundle. JobError for an archive of another kind."""
    if path.name.endswith((".zst", ".tar", ".tgz", ".zip")):
        raise JobError(f"{path}: a bundle is a file whose name ends in {BUNDLE_SUFFIX}")
    return path.name.endswith(BUNDLE_SUFFIX)


def write_bundle(path: Path, out: Path | None) -> Path:
    """Write the bundle of all runs that `path` names, and return its path. `out`: its path; None for one
    beside the job, or beside the folder of the suite. JobError if a run is not finished, or was edited."""
    runs = [_check_run(run) for run in open_runs(path)]
    found = find_cell(runs[0].paths.out)
    suite = find_suite(path) if found is None or len(runs) == 1 else found[0]
    place = runs[0].paths.job.with_suffix("") if suite is None else suite.with_suffix("")
    out = out or place.with_name(place.name + BUNDLE_SUFFIX)
    if not is_bundle(out):
        raise JobError(f"{out}: the name of a bundle ends in {BUNDLE_SUFFIX}")
    # Paths lead to places in the bundle as they are written, and to files here as the system reads them: the
    # two differ for `..` behind a symbolic link.
    paths = {os.path.abspath(each): each for run in runs for each in _list_files(run)}
    if found is not None:
        paths |= {os.path.abspath(each): each for each in _list_suite_files(found[0])}
    base = os.path.commonpath([os.path.dirname(each) for each in paths])
    files: dict[str, Path | bytes] = {
        f"{FILES}/{Path(place).relative_to(base).as_posix()}": each for place, each in paths.items()
    }
    for run in runs:
        files |= _copy_template(run, base)
    files["environment.txt"] = _list_packages(runs).encode()
    name = out.name.removesuffix(BUNDLE_SUFFIX)
    files["README.md"] = render_readme(name, runs).encode()
    write_archive(out, name, files)
    return out


def _check_run(run: RunFolder) -> RunFolder:
    """The run with its job file. JobError if it cannot be replayed."""
    if run.state != DONE:
        raise JobError(f"{run.paths.out}: the run is {run.state}; a bundle is made of a finished run")
    run = find_job(run)
    problems = run.check()
    if problems:
        raise JobError(f"{run.name}: it is not as it was written: {problems[0]}")
    return run


def _list_files(run: RunFolder) -> Iterator[Path]:
    """The files of a run, without what only its own machine can use."""
    yield from _list_job_files(run.paths)
    judge = JobPaths(run.paths.folder / JUDGE / "job.jsonl") if (run.paths.folder / JUDGE).is_dir() else None
    if judge is not None and judge.job.is_file():
        yield from _list_job_files(judge)
    yield from _list_media(run)


def _list_job_files(paths: JobPaths) -> Iterator[Path]:
    of_job = (paths.job, paths.out, paths.errors)
    of_run = (paths.manifest, paths.scores, paths.journal, paths.timings)
    yield from (path for path in (*of_job, *of_run) if path.is_file())


def _list_media(run: RunFolder) -> Iterator[Path]:
    """The media and files of tools that lines name. JobError for one that would not be found elsewhere."""
    folder = run.paths.job.parent.absolute()
    roots = [(folder / root).resolve() for root in rebuild_config(run).media.roots]
    seen: set[str] = set()
    for line in run.read_lines():
        agent = line.line.agent if isinstance(line.line, JobLine) else None
        if agent is not None and (tools := repr([agent.get(key) for key in _OF_TOOLS])) not in seen:
            seen.add(tools)
            yield from _list_tool_files(run, parse_agent(agent), folder)
        for name in [each for each in find_local_images(line.body) if each not in seen]:
            seen.add(name)
            path = folder / name
            if not path.is_file():  # the line failed, and will again
                continue
            if os.path.isabs(name) or not any(path.resolve().is_relative_to(root) for root in roots):
                where = "by an absolute path" if os.path.isabs(name) else "outside media.roots"
                raise JobError(f"{run.name}: line {line.id!r} names {name!r} {where}, which cannot travel")
            yield path


def _list_tool_files(run: RunFolder, agent: LineAgent, folder: Path) -> Iterator[Path]:
    """The files of tools. JobError for one that is not as it was when the job was made."""
    for name, digest in agent.digests.items():
        if compute_digest(folder / agent.folder / name) != digest:
            raise JobError(f"{run.name}: {name}, a file of its tools, has changed since the run, or is gone")
    yield from list_tool_paths(agent, folder)


def _list_suite_files(folder: Path) -> Iterator[Path]:
    """The manifest of a suite, and its file if that is as it was."""
    manifest = folder / SUITE_NAME
    yield manifest
    suite = (read_suite_manifest(manifest) or {}).get("suite") or {}
    for path in (folder.with_suffix(".yaml"), Path(str(suite.get("path")))):
        if path.is_file() and hash_file(path) == suite.get("sha256"):
            yield path
            return


def _copy_template(run: RunFolder, base: str) -> dict[str, Path | bytes]:
    """The chat template of the config, if it has one, beside the job. JobError if it is gone."""
    path = rebuild_config(run).model.chat_template
    if path is None:
        return {}
    if not Path(path).is_file():
        raise JobError(f"{run.name}: the chat template of its config is missing: {path}")
    place = Path(os.path.abspath(run.paths.job.parent)).relative_to(base) / Path(path).name
    return {f"{FILES}/{place.as_posix()}": Path(path)}


def _list_packages(runs: Sequence[RunFolder]) -> str:
    """The packages of this environment as a file of requirements, with the versions of the runs where these
    are recorded."""
    found = {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
    recorded: dict[str, Any] = {**list_versions(), **runs[0].manifest["versions"]}
    python = recorded.pop("python", "unknown")
    lines = sorted(f"{name}=={version}" for name, version in {**found, **recorded}.items())
    return f"# Python {python}\n" + "".join(f"{line}\n" for line in lines)


@contextmanager
def open_bundle(
    path: Path, folder: Path | None = None, left_out: list[str] | None = None
) -> Iterator[list[RunFolder]]:
    """Open the runs of a bundle. `folder`: where it is unpacked and stays; one that is there already has to
    be of this bundle. None for a temporary one. `left_out`: gets a sentence for each run that is not opened,
    as it would execute code of somebody else. JobError if the bundle is damaged, or if no run is opened;
    without `left_out`, also for the first one that is not."""
    parent = Path(tempfile.gettempdir()) if folder is None else folder.parent
    with ExitStack() as stack:
        with wrap_write_errors(parent, begun=False):
            temp = stack.enter_context(tempfile.TemporaryDirectory(prefix=".mlxrun-bundle-", dir=parent))
            unpacked = Path(temp, "bundle")
            unpacked.mkdir()
        unpack_archive(path, unpacked)
        if folder is not None:
            unpacked = _keep(unpacked, folder)
        own = read_sums(unpacked)  # beside them may be replays
        try:
            runs = [run for run in open_runs(unpacked / FILES) if _get_name(run, unpacked) in own]
            for run in runs:
                run.name = str(path) if len(runs) == 1 else f"{path}: {run.name}"
            refused = {run.name: text for run in runs if (text := _find_foreign_code(run))}
            if refused and (left_out is None or len(refused) == len(runs)):
                raise JobError(next(iter(refused.values())))
            if left_out is not None:
                left_out += refused.values()
            yield [run for run in runs if run.name not in refused]
        except JobError as error:
            if folder is None:  # nobody knows the temporary one
                error.args = (str(error).replace(f"{unpacked}/", f"{path}: "),)
            raise


def _get_name(run: RunFolder, unpacked: Path) -> str:
    """The name of a run's manifest in the bundle."""
    return run.paths.manifest.relative_to(unpacked).as_posix()


def _keep(unpacked: Path, folder: Path) -> Path:
    """Move what was unpacked to `folder`, or use what is there if it is the same."""
    if not folder.exists():
        shutil.move(unpacked, folder)
        return folder
    is_same = (folder / SUMS).is_file() and read_sums(folder) == read_sums(unpacked)
    if not is_same or any(hash_file(folder / name) != digest for name, digest in read_sums(folder).items()):
        raise JobError(f"{folder}: is there already, and is not this bundle as it was unpacked; move it away")
    return folder


def _find_foreign_code(run: RunFolder) -> str:
    """Which code of somebody else a run would execute, of its model or its tools; empty for none."""
    lines = (line.line for line in run.read_lines())
    if rebuild_config(run).model.trust_remote_code:
        what = "its config has model.trust_remote_code, so that code of the model would run"
    elif any(isinstance(line, JobLine) and line.agent is not None for line in lines):
        what = "its lines have tools, which would run"
    else:
        return ""
    return f"{run.name}: {what}; if you trust it, unpack the bundle and give the folder"
