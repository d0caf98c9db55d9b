"""Files whose texts would command the terminal: no control character of theirs arrives there, whichever
command shows it, and no text of theirs begins a line.

Each command is run twice: as it is, and as a mutation twin without the filter, which has to be found.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import command as benchmarks_command
from mlxrun.cli.main import main
from mlxrun.cli.options import set_up_logging
from mlxrun.config.settings import Config, LogSettings
from mlxrun.core import visible_text
from mlxrun.model.load.model_files import EMBEDDED
from tests.cli.conftest import fake_engine  # noqa: F401
from tests.helpers.batch_fakes import chat, write_job
from tests.helpers.server_fakes import run_server, server_config
from tests.helpers.suite_files import write_suite

# Titles, the clipboard, colours, controls of eight bits, DEL, marks of direction, a line of its own.
HOSTILE = (
    "x\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x1b[8m\x9b31m\x7f\x85"
    "\u202e\u2066\u2028\rFORGED\nFORGED\n12:00:00 INFO"
)
COMMANDING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
FORGED = re.compile(r"^(FORGED|12:00:00 INFO)", re.MULTILINE)
MORE = {"expected": "say", "match": "contains", "group": HOSTILE}
LINES = [
    chat("a" + HOSTILE, "say 1", MORE),
    chat("b", "say " + HOSTILE, MORE | {"group": "g"}),
    chat("c" + HOSTILE, "LONG 1", MORE),
    chat("d", "say 2", **{"temprature" + HOSTILE: 1}),
    chat("e", "say 3", model=HOSTILE, tool_choice=HOSTILE),
    {**chat("f", "say 4"), "url": "/v1/" + HOSTILE},
    {**chat("g", "say 4"), HOSTILE: 1},
    "{" + HOSTILE.replace("\n", " "),
    chat("a" + HOSTILE, "say 1"),
]


def to_yaml(text: str) -> str:
    """A text in double quotes, as YAML 1.2 and JSON have it."""
    return json.dumps(text)


def run_job(folder: Path, *flags: str) -> Path:
    job = write_job(folder, LINES)
    main(["batch", str(job), *flags])
    return job


def try_batch(folder: Path) -> None:
    job = run_job(folder)
    main(["batch", str(job), "--dry-run"])
    main(["batch", str(job), "--strict", "--fresh"])
    main(["batch", str(folder / HOSTILE)])
    main(["batch", str(job), HOSTILE])
    main(["batch", str(job), "--scorer", HOSTILE])


def try_config(folder: Path) -> None:
    key, text = to_yaml("moddel" + HOSTILE), to_yaml(HOSTILE)
    (folder / "wrong.yaml").write_text(
        f"{key}: 1\nmodel: {{{key}: {text}, path: {text}}}\nscheduler: {{policy: {text}, chunk: {text}}}\n"
        f"extends: {text}\nserver: {{port: {text}, host: {text}}}\nparsers: {{tool_calls: {text}}}\n"
    )
    (folder / "right.yaml").write_text(f"model: {{path: {text}, adapters: {{{text}: {text}}}}}\n")
    (folder / HOSTILE).write_text("a: [\n")
    for name in ("wrong.yaml", "right.yaml", HOSTILE):
        main(["config", "check", str(folder / name)])
        main(["config", "show", "-c", str(folder / name)])
        main(["config", "show", "--json", "-c", str(folder / name)])
    main(["config", "check", "--set", HOSTILE, "--set", f"{HOSTILE}={HOSTILE}"])


def try_scores(folder: Path) -> None:
    """All that reads the folder of a run."""
    first = run_job(folder)
    second = run_job(folder, "-o", str(folder / f"other{HOSTILE}.jsonl"), "--set", "sampling.seed=3")
    other = folder / f"other{HOSTILE}.jsonl"
    main(["compare", str(first), str(other), "--show", "9", "--any-prompt"])
    main(["compare", str(first), str(other), "--json", "-"])
    main(["score", str(second), "--match", "exact"])
    main(["report", str(first), "-o", "-", "--format", "md"])
    main(["verify", str(first), "--all"])
    main(["replay", str(first)])
    main(["export", str(first), "--format", HOSTILE])
    out = folder / "job.out.jsonl"
    out.write_bytes(out.read_bytes().replace(b"say", b"sag"))
    main(["verify", str(first)])


def try_suite(folder: Path) -> None:
    name, text = to_yaml("m" + HOSTILE), to_yaml(HOSTILE)
    task = f'{{data: t.jsonl, prompt: "{{{{ text }}}}", expected: text, match: contains, group: {text}}}'
    table = json.dumps({"text": "say " + HOSTILE, HOSTILE: HOSTILE}) + "\n"
    suite = write_suite(folder, f"models: {{tiny: }}\ntasks: {{t: {task}}}\n", t_jsonl=table)
    main(["eval", str(suite)])
    task = task.replace(f"group: {text}", 'group: "{{ text }}"')
    write_suite(folder, f"models: {{tiny: }}\ntasks: {{t: {task}}}\n", t_jsonl=table)
    main(["eval", str(suite), "--dry-run"])
    main(["eval", str(suite)])
    main(["eval", str(suite), "--only", HOSTILE])
    write_suite(folder, f"models: {{{name}: {{set: {{{text}: 1}}}}}}\ntasks: {{{name}: {text}}}\n{name}: 3\n")
    main(["eval", str(suite)])


def try_job_make(folder: Path) -> None:
    (folder / "t.jsonl").write_text(json.dumps({HOSTILE: HOSTILE, "id": "a" + HOSTILE}) + "\n")
    (folder / "line.yaml").write_text(f"prompt: {to_yaml(HOSTILE)}\n{to_yaml(HOSTILE)}: 3\n")
    table = str(folder / "t.jsonl")
    main(["job", "make", table, "--prompt", "{{ id }}", "-o", "-"])
    main(["job", "make", table, "--prompt", "{{ nothing }}" + HOSTILE, "-o", str(folder / "o.jsonl")])
    main(["job", "make", table, "--prompt", "{% " + HOSTILE, "-o", str(folder / "o.jsonl")])
    main(["job", "make", table, "--template", str(folder / "line.yaml"), "-o", str(folder / "o.jsonl")])
    main(["job", "make", table, "--prompt", "x", "--id", HOSTILE, "-o", str(folder / "o.jsonl")])
    main(["job", "make", table, "--prompt", "x", "--set", HOSTILE])


COMMANDS = [try_batch, try_config, try_scores, try_suite, try_job_make]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fake_parts(fake_engine: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Neither a model nor a device."""
    monkeypatch.setattr("mlxrun.model.doctor.describe_device", lambda: {"name": "fake"})


def find_harm(shown: str) -> list[str]:
    """What a terminal would obey, and lines that a file has forged."""
    return [*COMMANDING.findall(shown), *FORGED.findall(shown)]


def without_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: text is shown as it is."""
    monkeypatch.setattr(visible_text, "_HIDDEN", re.compile(r"(?!)"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.usefixtures("fake_parts")
def test_no_command_shows_control_characters(
    command: Callable[[Path], None], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    command(tmp_path)
    shown = b"".join(capsysbinary.readouterr()).decode(errors="surrogateescape")
    assert find_harm(shown) == [], shown
    assert "\\x1b]0;owned\\x07" in shown
    assert "this is a bug" not in shown, shown


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.usefixtures("fake_parts")
def test_without_the_filter_they_are_found(
    command: Callable[[Path], None],
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_filter(monkeypatch)
    command(tmp_path)
    assert find_harm(b"".join(capsysbinary.readouterr()).decode(errors="surrogateescape"))


@pytest.mark.usefixtures("fake_parts")
def test_a_page_that_is_printed(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Its texts have lines."""
    job = run_job(tmp_path)
    capsysbinary.readouterr()
    assert main(["report", str(job), "-o", "-"]) == 0
    assert COMMANDING.findall(capsysbinary.readouterr().out.decode()) == []


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def show_on_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """All that a job writes to a terminal, with a bar, a table and colours."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "400")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        run_job(folder)
        try_suite(folder)
    return terminal.getvalue()


# What rich writes: colours, the cursor's moves, erasing, hiding it.
STYLES = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]*[A-K]|\?25[lh]|2?K)|\r")


@pytest.mark.usefixtures("fake_parts")
def test_a_terminal_gets_the_styles_of_mlxrun_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = show_on_terminal(tmp_path, monkeypatch)
    assert "\x1b[1m" in shown, "nothing is styled"
    assert "\x1b[8m" not in shown and find_harm(STYLES.sub("", shown)) == [], shown


@pytest.mark.usefixtures("fake_parts")
def test_a_terminal_without_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_filter(monkeypatch)
    assert find_harm(STYLES.sub("", show_on_terminal(tmp_path, monkeypatch)))


def try_doctor(folder: Path) -> None:
    shutil.copytree(EMBEDDED, folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": HOSTILE, HOSTILE: HOSTILE}))
    for flags in ([], ["--json"]):
        main(["doctor", *flags, "--set", f"model.path={folder / 'model'}"])
    main(["sweep", HOSTILE], benchmarks_command)


def test_doctor_shows_a_hostile_model(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    try_doctor(tmp_path)
    shown = b"".join(capsysbinary.readouterr()).decode(errors="surrogateescape")
    assert find_harm(shown) == [], shown
    assert "owned" in shown and "this is a bug" not in shown


async def show_requests(form: str) -> str:
    """The log of a server whose clients send hostile paths, headers, names and bodies."""
    stream = io.StringIO()
    set_up_logging(LogSettings(level="debug", format=form))  # type: ignore[arg-type]
    [handler] = [each for each in logging.getLogger().handlers if type(each) is logging.StreamHandler]
    handler.setStream(stream)
    config: Config = replace(server_config(), log=LogSettings(level="debug", prompts=True))
    async with run_server(config) as s:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": HOSTILE}]}
        for more in ({}, {"model": HOSTILE}, {HOSTILE: 1}, {"tool_choice": HOSTILE}, {"user": HOSTILE}):
            await s.post("/v1/chat/completions", body | more)
        host, port = s.url.removeprefix("http://").split(":")
        for path in (HOSTILE.partition("\r")[0], "/%1b%5d0;x%07%0a", "/v1/files/%9b%0aFORGED"):
            reader, writer = await asyncio.open_connection(host, int(port))
            name = HOSTILE.partition("\r")[0]
            head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {name}\r\nUser-Agent: {name}\r\n"
            writer.write(head.encode() + b"Authorization: Bearer " + name.encode() + b"\r\n\r\n")
            writer.write_eof()
            await reader.read()
            writer.close()
    logging.getLogger("mlxrun.test").warning("a file is named %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("mlxrun.test").exception("failed: %s", HOSTILE)
    return stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
async def test_the_log_of_a_server(form: str) -> None:
    shown = await show_requests(form)
    assert find_harm(shown) == [], shown
    assert "owned" in shown
    if form == "json":
        assert all(json.loads(line) for line in shown.splitlines())


@pytest.mark.parametrize("form", ["text", "json"])
async def test_the_log_without_the_filter(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_filter(monkeypatch)
    assert find_harm(await show_requests(form))
