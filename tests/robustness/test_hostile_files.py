"""Files that are FIFOs or devices, nested without end, or as long as they like: each ends at once in a
message that says what is wrong and where, in at most 2 kB, and never in a traceback.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from mlxrun.core import text_files
from mlxrun.core.errors import MAX_MESSAGE
from mlxrun.model.load.model_files import EMBEDDED
from tests.cli.conftest import fake_engine  # noqa: F401
from tests.helpers.batch_fakes import chat, chats, write_job
from tests.helpers.suite_files import write_suite

DEEP = "[" * 100_000
LONG = "/" + "/".join(["x" * 200] * 50)
Files = Callable[[Path], list[str]]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def in_config(text: str) -> Files:
    return lambda folder: ["config", "check", str(write(folder / "c.yaml", text))]


def in_suite(text: str) -> Files:
    return lambda folder: ["eval", str(write_suite(folder, text))]


def in_model(name: str, text: str | None) -> Files:
    """The embedded model with one file of its own, or with a FIFO (None)."""

    def make(folder: Path) -> list[str]:
        model = folder / "model"
        shutil.copytree(EMBEDDED, model)
        (model / name).unlink(missing_ok=True)
        if text is None:
            os.mkfifo(model / name)
        else:
            write(model / name, text)
        return ["doctor", "--json", "--set", f"model.path={model}", "--set", "engine.load_check=false"]

    return make


def with_fifo(*arguments: str) -> Files:
    """A command with a FIFO; it stands for FIFO in the arguments."""

    def make(folder: Path) -> list[str]:
        os.mkfifo(folder / "fifo.yaml")
        write(folder / "t.csv", "a,b\n1,2\n")
        write_job(folder, chats(2))
        return [each.replace("FIFO", "fifo.yaml") for each in arguments]

    return make


def in_template(text: str) -> Files:
    def make(folder: Path) -> list[str]:
        return ["config", "check", "--set", f"model.chat_template={write(folder / 't.jinja', text)}"]

    return make


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrstu", "bcdefghijklmnopqrstuv", strict=True))  # fmt: skip  # noqa: E501

CASES: dict[str, tuple[Files, str]] = {
    "a device that is extended": (in_config("extends: /dev/zero\n"), "/dev/zero: it is a device"),
    "a number of a million digits": (in_config(f"server: {{port: 0x{'9' * 10**6}}}\n"), "c.yaml"),
    "a long number": (in_config(f"server: {{port: 0x{'9' * 10**5}}}\n"), "c.yaml:1:16: server.port:"),
    "a decimal number": (in_config(f"server: {{port: {'9' * 10**5}}}\n"), "c.yaml:1:16: server.port:"),
    "a long path": (in_config(f"model: {{path: {LONG}}}\n"), "c.yaml:1:15: model.path:"),
    "a long path of an adapter": (in_config(f"model: {{adapter: {LONG}}}\n"), "model.adapter:"),
    "a long relative path": (in_config(f"model: {{path: {'x' * 10_000}}}\n"), "model.path:"),
    "a long path of a GGUF file": (in_config(f"model: {{path: {LONG}.gguf}}\n"), "model.path:"),
    "a NUL in a path": (in_config('model: {path: "/tmp/a\\0b"}\n'), "model.path: /tmp/a\\x00b"),
    "a NUL in a config's path": (in_config('extends: "a\\0b"\n'), "c.yaml:1:10: extends:"),
    "a long config's path": (in_config(f"extends: {LONG}\n"), "File name too long"),
    "deep YAML": (in_config("a: " + DEEP), "c.yaml:1:1: this is not YAML: it is nested too deeply"),
    "deep YAML in a suite": (in_suite("models: " + DEEP), "suite.yaml:1:1: this is not YAML"),
    "aliases that multiply": (in_config(BOMB), "too many values: aliases multiply them"),
    "aliases that multiply in a suite": (in_suite(BOMB), "too many values"),
    "a large config": (in_config("# " + "x" * 2_000_000), "c.yaml: it has more than 1,048,576 bytes"),
    "a config that is a FIFO": (with_fifo("config", "check", "FIFO"), "fifo.yaml: it is a FIFO"),
    "a job that is a FIFO": (with_fifo("batch", "FIFO"), "fifo.yaml: cannot read the job file: it is a FIFO"),
    "a job that is a device": (with_fifo("batch", "/dev/zero"), "/dev/zero: cannot read the job file: it is"),
    "a suite that is a FIFO": (with_fifo("eval", "FIFO"), "fifo.yaml: cannot read the suite: it is a FIFO"),
    "a table that is a FIFO": (
        lambda folder: [
            *("job", "make", str(folder / "t.csv"), "--prompt", "{{ a }}"),
            *("-o", str(os.mkfifo(folder / "t.csv") or folder / "o.jsonl")),
        ],
        "t.csv: cannot be read: it is a FIFO",
    ),
    "a template that is a FIFO": (
        with_fifo("job", "make", "t.csv", "--template", "FIFO", "-o", "o.jsonl"),
        "fifo.yaml: cannot read the template: it is a FIFO",
    ),
    "a chat template that is a FIFO": (
        with_fifo("config", "check", "--set", "model.chat_template=FIFO"),
        "fifo.yaml is not a file",
    ),
    "a chat template in brackets": (
        in_template("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}"),
        "t.jinja:1: it is nested too deeply",
    ),
    "a chat template of nested ifs": (
        in_template("{% if a %}" * 3_000 + "{% endif %}" * 3_000),
        "t.jinja:1: it is nested too deeply",
    ),
    "a chat template of nested loops": (
        in_template("{% for a in b %}" * 60 + "{% endfor %}" * 60),
        "t.jinja:1: it is nested too deeply",
    ),
    "a large chat template": (in_template("x" * 2_000_000), "t.jinja: it has more than"),
    "a deep config.json": (in_model("config.json", DEEP), "config.json: its values are nested too deeply"),
    "a deep object": (in_model("config.json", '{"a":' * 100_000), "config.json: its values are nested too"),
    "a long number in config.json": (in_model("config.json", '{"a": ' + "9" * 10**6 + "}"), "config.json: "),
    "a deep tokenizer_config.json": (in_model("tokenizer_config.json", DEEP), "tokenizer_config.json: its"),
    "a deep tokenizer.json": (in_model("tokenizer.json", DEEP), "tokenizer.json: the file is damaged"),
    "a deep preprocessor": (in_model("preprocessor_config.json", DEEP), "preprocessor"),
    "a config.json that is a FIFO": (in_model("config.json", None), "config.json: it is a FIFO"),
    "a tokenizer.json that is a FIFO": (in_model("tokenizer.json", None), "tokenizer.json: it is a FIFO"),
    "a template of the model that is a FIFO": (in_model("chat_template.jinja", None), "jinja: it is a FIFO"),
    "a model's template in brackets": (
        in_model("chat_template.jinja", "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}"),
        "chat_template.jinja: the chat template is broken: line 1: it is nested too deeply",
    ),
    "a config in UTF-16": (
        lambda folder: ["config", "check", str(write(folder / "c.yaml", "log: {}\n".encode("utf-16")))],
        "c.yaml: it is in UTF-16 (little-endian)",
    ),  # fmt: skip  # noqa: E501
    "a config in UTF-32": (
        lambda folder: ["config", "check", str(write(folder / "c.yaml", "log: {}\n".encode("utf-32")))],
        "c.yaml: it is in UTF-32 (little-endian)",
    ),  # fmt: skip  # noqa: E501
    "a config in UTF-16 without a mark": (
        lambda folder: ["config", "check", str(write(folder / "c.yaml", "log: {}\n".encode("utf-16-be")))],
        "c.yaml: it is in UTF-16 (big-endian)",
    ),  # fmt: skip  # noqa: E501
    "a suite in UTF-16": (
        lambda folder: ["eval", str(write(folder / "s.yaml", "models: {}\n".encode("utf-16")))],
        "the suite: it is in UTF-16",
    ),  # fmt: skip  # noqa: E501
    "a job in UTF-16": (
        lambda folder: [
            "batch",
            str(write(folder / "j.jsonl", '{"id": "a", "prompt": "b"}\n'.encode("utf-16"))),
        ],
        "j.jsonl: cannot read the job file: it is in UTF-16",
    ),  # fmt: skip  # noqa: E501
    "a table in UTF-16": (
        lambda folder: [
            "job",
            "make",
            str(write(folder / "t.csv", "a,b\n1,2\n".encode("utf-16"))),
            "--prompt",
            "{{ a }}",
        ],
        "t.csv: cannot be read: it is in UTF-16",
    ),  # fmt: skip  # noqa: E501
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, said = CASES[name]
    arguments = make(tmp_path)
    assert main(arguments) in (1, 2, 3)
    shown = "".join(capsys.readouterr())
    assert said in " ".join(shown.split()), shown[:3_000]
    assert "Traceback" not in shown and "this is a bug" not in shown
    errors = [line for line in shown.splitlines() if line.startswith("mlxrun:")]
    assert all(len(line.encode()) <= MAX_MESSAGE for line in errors)
    assert len(errors) <= 3, errors


def test_files_with_a_mark_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path / "c.yaml", "\ufefflog: {level: debug}\n")
    assert main(["config", "check", str(config)]) == 0


@pytest.mark.usefixtures("fake_engine")
def test_a_job_with_a_mark_runs(tmp_path: Path) -> None:
    job = write_job(tmp_path, chats(2))
    write(job, "\ufeff" + job.read_text())
    assert main(["batch", str(job)]) == 0


@pytest.mark.usefixtures("fake_engine")
def test_deep_lines_contain_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines whose JSON is nested 100,000 deep; the others are answered."""
    deep = '{"id": "deep", "prompt": ' + DEEP + "]" * 100_000 + "}"
    job = write_job(tmp_path, [*chats(2), deep, deep.replace("deep", "d2")[:-1]])
    assert main(["batch", str(job)]) == 1
    out, err = capsys.readouterr()
    assert "2 of 4 lines done" in out and "nested too deeply" in err and "Traceback" not in err


def test_without_the_check_a_device_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: a file is opened whatever it is, and the end of /dev/zero is not reached."""
    monkeypatch.setattr(text_files, "_KINDS", ())
    with pytest.raises(OSError, match="more than 1,048,576 bytes"):
        text_files.read_regular(Path("/dev/zero"))


def test_what_the_files_of_a_chain_extend_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each extends the next one twice: 2^30 files to read."""
    for at in range(30):
        write(tmp_path / f"c{at}.yaml", f"extends: [c{at + 1}.yaml, c{at + 1}.yaml]\n")
    write(tmp_path / "c30.yaml", "")
    assert main(["config", "check", str(tmp_path / "c0.yaml")]) == 2
    assert "extend more than 100 others" in capsys.readouterr().err


def test_many_problems_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path / "c.yaml", "".join(f"k{at}: {json.dumps('x')}\n" for at in range(3_000)))
    assert main(["config", "check", str(config)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 101 and lines[-1] == "... and 2900 more"


@pytest.mark.usefixtures("fake_engine")
def test_the_records_of_lines_with_long_names_are_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "k" * 10**6
    lines = [
        chat("a", "x") | {long: 1},
        f'{{"id": "b", "prompt": "x", "{long}": 1, "{long}": 2}}',
        chat("c", "x", **{long: 1}),
        chat("d", "x", model=long, tool_choice=long),
    ]
    job = write_job(tmp_path, [*lines, chat("e", "x", {"expected": "x", "match": long})])
    assert main(["batch", str(job)]) == 2  # an `eval` that cannot be read ends the job at its start
    assert main(["batch", str(job), "--dry-run"]) == 1
    shown = "".join(capsys.readouterr())
    assert all(len(line.encode()) <= MAX_MESSAGE for line in shown.splitlines())
    job = write_job(tmp_path, lines)
    assert main(["batch", str(job)]) == 1
    records = [json.loads(line) for line in (tmp_path / "job.errors.jsonl").read_text().splitlines()]
    assert len(records) == 4
    for record in records:
        error = record["error"]
        assert len(error["message"].encode()) <= MAX_MESSAGE
        assert error["param"] is None or len(error["param"]) <= MAX_MESSAGE


def open_pipe(text: str) -> tuple[str, int]:
    """The path of a pipe as a shell passes `<(echo TEXT)`, and its handle."""
    out, into = os.pipe()
    os.write(into, text.encode())
    os.close(into)
    return f"/dev/fd/{out}", out


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("log: {level: debug}\n", 0, "ok"),
        ("", 0, "ok"),
        ("log: {levl: debug}\n", 2, ":1:7: log.levl: unknown key (did you mean 'level'?)"),
        ("extends: inner.yaml\n", 2, "inner.yaml:1:10: extends: /dev/fd/"),  # which names the pipe again
    ],
)
def test_a_config_may_come_from_the_pipe_of_a_shell(
    text: str,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No config can name a pipe."""
    monkeypatch.chdir(tmp_path)
    path, handle = open_pipe(text)
    inner, other = open_pipe("log: {}\n")
    write(tmp_path / "inner.yaml", f"extends: {inner}\n")
    try:
        assert main(["config", "check", path]) == code
    finally:
        os.close(handle)
        os.close(other)
    assert said in "".join(capsys.readouterr())


def test_paths_of_a_piped_config_begin_in_the_working_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, handle = open_pipe("model: {chat_template: ./t.jinja}\n")
    write(tmp_path / "t.jinja", "{{ messages }}")
    try:
        assert main(["config", "show", "-c", path]) == 0
    finally:
        os.close(handle)
    assert f"chat_template: {tmp_path / 't.jinja'}" in capsys.readouterr().out


def test_a_job_in_the_pipe_of_a_shell_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    path, handle = open_pipe('{"id": "a", "prompt": "b"}\n')
    try:
        assert main(["batch", path]) == 2
    finally:
        os.close(handle)
    err = capsys.readouterr().err
    assert "a job is read more than once, so write it to a file" in err and "Traceback" not in err
