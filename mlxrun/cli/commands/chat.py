"""`mlxrun chat`: a conversation at the terminal, with a running server or with a model in this process."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxrun.cli.options import (
    add_config_options,
    add_model_argument,
    load_command_config,
    name_model,
    say,
)
from mlxrun.core.terminal import open_console

if TYPE_CHECKING:
    from mlxrun.cli.chat.session import ChatSession
    from mlxrun.cli.server_client import ServerClient

LOCAL = "http://127.0.0.1:8000"
KEY_VARIABLE = "MLXRUN_API_KEY"
_LOOK_SECONDS = 0.5  # that a server on this machine may take to say which model it has


@click.command(
    epilog="""\b
Examples:
  mlxrun chat                               with the server on http://127.0.0.1:8000, or the built-in model
  mlxrun chat qwen3-4b-4bit                 a model of the hub, or of a folder, in this process
  mlxrun chat --url http://mac.local:8000 --key KEY
  mlxrun chat -p 'What is in photo.jpg?'    one question; photo.jpg is attached
  cat log.txt | mlxrun chat -p 'What went wrong?'

\b
Within it: /help lists the commands. The path of an image or a PDF in a question attaches it. Ctrl-C stops an
answer. What was typed is kept in ~/.local/share/mlxrun/chat_history.
"""
)
@add_model_argument
@click.option("-p", "--prompt", metavar="TEXT", help="Ask this and end; what is piped in comes before it.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--url", metavar="URL", help="The server that answers.")
@click.option("--key", metavar="KEY", envvar=KEY_VARIABLE, help=f"Its API key; by default ${KEY_VARIABLE}.")
@click.option("--stats", is_flag=True, help="Show tokens and speed after each answer.")
@add_config_options
def command(
    model: str | None,
    prompt: str | None,
    system: str | None,
    url: str | None,
    key: str | None,
    stats: bool,
    config_path: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Talk with a model at the terminal."""
    from mlxrun.cli.chat.conversation import Conversation
    from mlxrun.cli.chat.session import ChatSession

    if url is not None and (model is not None or config_path is not None or sets):
        raise click.UsageError("--url names a server, which has its model: give no MODEL, -c or --set")
    is_free = model is None and config_path is None and not sets
    with _open_client(
        url or (find_server(key) if is_free else None), key, model, config_path, sets
    ) as client:
        session = ChatSession(client, open_console(), Conversation(system), shows_stats=stats)
        if prompt is not None or not sys.stdin.isatty():
            piped = "" if sys.stdin.isatty() else sys.stdin.read()
            session.ask("\n\n".join(filter(None, (piped.strip(), prompt))))
        else:
            _converse(session)


def find_server(key: str | None) -> str | None:
    """The usual address, else that of the newest server on this machine, if a server answers there."""
    from mlxrun.cli.server_client import ClientError

    for url in dict.fromkeys((LOCAL, *reversed(list_certificates()))):
        with suppress(ClientError):
            make_client(url, key).list_models(_LOOK_SECONDS)
            return url
    return None


def list_certificates() -> dict[str, str | None]:
    """The certificates of the servers on this machine by their URLs, the oldest first."""
    from mlxrun.server.running_servers import find_notes_folder, list_servers

    return {note.url: note.certificate for note in list_servers(find_notes_folder(os.environ))}


def make_client(url: str, key: str | None) -> ServerClient:
    """A client of the server at `url`, which accepts only its own certificate if it runs on this machine."""
    from mlxrun.cli.server_client import ServerClient

    return ServerClient(url, key, list_certificates().get(url.rstrip("/").removesuffix("/v1")))


@contextmanager
def _open_client(
    url: str | None, key: str | None, model: str | None, config_path: Path | None, sets: tuple[str, ...]
) -> Iterator[ServerClient]:
    """A client of the server at `url`; without one, of a server in this process."""
    if url is not None:
        client = make_client(url, key)
        say(f"{client.url}: {', '.join(client.list_models())}")
        yield client
        return
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.cli.chat.local_server import run_local_server
    from mlxrun.cli.server_client import ServerClient

    loaded = load_command_config(config_path, name_model(model, ("log.level=warning", *sets)))
    if loaded.config.log.level == "warning":
        logging.getLogger("mlxrun.model.model_loading").setLevel(logging.INFO)  # says what takes long
    say(f"loading {loaded.config.model.path}")
    with run_local_server(loaded.config) as found:
        yield ServerClient(found)


def _converse(session: ChatSession) -> None:
    """Read from the terminal, with what was typed before. Each Ctrl-C ends one answer or one line."""
    history = _load_history()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    say("/help lists the commands, Ctrl-D ends")
    try:
        session.run(input)
    finally:
        signal.signal(signal.SIGINT, before)
        _save_history(history)


def _load_history() -> Path:
    from mlxrun.server.data_folder import find_data_folder

    path = find_data_folder(os.environ) / "chat_history"
    with suppress(ImportError, OSError):
        import readline

        readline.read_history_file(path)
    return path


def _save_history(path: Path) -> None:
    with suppress(ImportError, OSError):
        import readline

        path.parent.mkdir(parents=True, exist_ok=True)
        readline.set_history_length(1000)
        readline.write_history_file(path)
        path.chmod(0o600)
