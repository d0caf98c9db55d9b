"""`mlxrun chat` with the built-in model, in this process and over HTTP."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.chat.local_server import run_local_server
from mlxrun.cli.main import main
from mlxrun.cli.server_client import ClientError, ServerClient
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from tests.helpers.command_processes import start_program

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(autouse=True)
def _nothing_else_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.cli.server_client.LOCAL", "http://127.0.0.1:9")


def test_a_first_load_says_what_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "-p", "2 + 3?", "--set", "engine.load_check=always"]) == 0
    shown = capsys.readouterr().err
    assert "with its library" in shown and "loaded " not in shown, "other lines are not shown"


def test_a_server_that_loads_is_named_where_it_is_not_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("mlxrun.cli.server_client.list_certificates", lambda: {"http://127.0.0.1:9": None})
    monkeypatch.setattr("mlxrun.cli.server_client.read_state", lambda url, certificate: "loading")
    assert main(["chat", "-p", "What is 2 + 3?"]) == 0
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("http://127.0.0.1:9 cannot be asked now, its state is: loading; a model in")


def test_one_question(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is\n"))
    sets = ("--set", "sampling.temperature=0", "--set", "apis.openai=false")  # which is for other clients
    assert main(["chat", "-p", "2 + 3?", *sets]) == 0
    found = capsys.readouterr()
    assert "5" in found.out and "loading embedded" in found.err


def test_what_is_piped_in_may_be_no_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a log of a program that writes Latin-1."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert main(["chat", "-p", "What is 2 + 3?", "--set", "sampling.temperature=0"]) == 0
    assert "loading embedded" in capsys.readouterr().err


def test_a_server_is_used_where_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client says what the server refuses. A model that cannot be loaded is an error as elsewhere."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with run_local_server(Config()) as url:
        monkeypatch.setattr("mlxrun.cli.server_client.LOCAL", url)
        assert main(["chat", "-p", "What is 2 + 3?"]) == 0
        assert f"{url}: embedded" in capsys.readouterr().err
        client = ServerClient(f"{url}/v1/")
        parts = list(client.stream(QUESTION, {"temperature": 0}))
        assert "5" in "".join(part.text for part in parts)
        assert parts[-1].usage is not None and parts[-1].usage["completion_tokens"] >= 1
        with pytest.raises(ClientError, match="temperature"):
            list(client.stream(QUESTION, {"temperature": -1}))
        assert main(["chat", "-p", "a", "--url", url, "--set", "log.level=debug"]) == 2
    with pytest.raises(ClientError, match="does not answer"):
        client.list_models()
    assert main(["chat", "--url", "http://127.0.0.1:9", "-p", "a"]) == 1


def test_one_question_has_a_limit_of_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given, else the config's in this process, else one that leaves room in a server's context."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "-p", "2 + 3?", "--set", "sampling.max_tokens=1"]) == 0
    assert "cut at its maximum number of tokens (1); --max-tokens N sets it" in capsys.readouterr().err
    sent: list[Any] = []
    stream = ServerClient.stream

    def record(self: ServerClient, messages: Any, fields: Any) -> Any:
        sent.append(dict(fields))
        return stream(self, messages, fields)

    monkeypatch.setattr(ServerClient, "stream", record)
    with run_local_server(Config()) as url:
        for given in ([], ["--max-tokens", "2"]):
            assert main(["chat", "-p", "2 + 3?", "--url", url, *given]) == 0
        assert main(["chat", "embedded", "-p", "2 + 3?", "--url", url]) == 0
        assert main(["chat", "embeded", "-p", "2 + 3?", "--url", url]) == 1
    assert "the server has no model embeded (did you mean 'embedded'?)" in capsys.readouterr().err
    assert sent == [{"max_tokens": 1024}, {"max_tokens": 2}, {"max_tokens": 1024, "model": "embedded"}]
    assert main(["chat", "-p", "a", "--max-tokens", "0"]) == 2


def test_a_file_that_the_model_takes_not_is_refused_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for name in ("find_server", "explain_refusal"):  # of other tests' servers, which may be loading
        monkeypatch.setattr(f"mlxrun.cli.commands.chat.{name}", lambda key: None)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    assert main(["chat", "-p", f"What is in {tmp_path}/a.wav?"]) == 1
    said = capsys.readouterr().err
    assert "a.wav: the model 'embedded' does not accept audio" in said and "loading" not in said


def test_several_models_are_for_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, and the help says which server answers."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    path = tmp_path / "several.yaml"
    path.write_text("models: {chat: embedded}\n")
    assert main(["chat", "-p", "a", "-c", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}:1:9: models: only `mlxrun serve`" in said and "start `mlxrun serve` with it" in said
    assert main(["chat", "--help"]) == 0
    assert "else the newest" in capsys.readouterr().out


def test_without_a_question_nothing_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(["chat"]) == main(["chat", "-p", ""]) == 2
    said = capsys.readouterr().err
    assert "there is no question: give -p TEXT" in said and "loading" not in said


def test_what_prevents_the_server_is_raised() -> None:
    from dataclasses import replace

    config = Config()
    config = replace(config, model=replace(config.model, path="/nothing"))
    with pytest.raises((ConfigError, Exception), match="nothing"), run_local_server(config):
        raise AssertionError("it runs")


def test_an_interrupt_does_not_wait_for_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that loads cannot be interrupted, and ends with the process. The signal does not end a wait
    of the main thread, as one that comes just before it."""
    release = threading.Event()

    async def load(config: Config) -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.to_thread(release.wait, 10.0)
        raise ConfigError("released")

    joined: list[str] = []
    monkeypatch.setattr("mlxrun.cli.run_setup.load_engine", load)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda self, timeout=None: joined.append(self.name))
        with pytest.raises(KeyboardInterrupt), run_local_server(Config()):
            raise AssertionError("it runs")
    release.set()
    assert joined == []


@pytest.mark.slow
@pytest.mark.parametrize("end_by", [None, signal.SIGTERM, signal.SIGHUP])  # the last for a terminal that ends
def test_at_a_terminal(tmp_path: Path, end_by: signal.Signals | None) -> None:
    """An answer comes, /bye or a signal ends the session, and what was typed is kept."""
    code = (
        "import sys; from mlxrun.cli import server_client; from mlxrun.cli.main import main;"
        "server_client.LOCAL = 'http://127.0.0.1:9'; sys.exit(main())"
    )
    environ = os.environ | {"XDG_DATA_HOME": str(tmp_path), "TERM": "dumb"}
    screen, end = pty.openpty()
    command = [sys.executable, "-c", code, "chat", "--set", "sampling.temperature=0"]
    shown = ""

    def wait_for(text: str, typed: str) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(screen, 4096).decode(errors="replace")  # OSError once it has ended
        shown = shown.partition(text)[2]
        os.write(screen, typed.encode())

    with start_program(command, stdin=end, stdout=end, stderr=end, env=environ) as process:
        os.close(end)
        wait_for(">>> ", "What is 2 + 3?\n")
        wait_for("5", "")
        if end_by is None:
            wait_for(">>> ", "/bye\n")
            assert process.wait(60) == 0
        else:
            wait_for(">>> ", "")
            process.send_signal(end_by)
            wait_for("mlxrun: interrupted", "")
            assert process.wait(60) == 130
    os.close(screen)
    assert "What is 2 + 3?" in (tmp_path / "mlxrun" / "chat_history").read_text()
