"""`mlxrun chat`: a conversation at the terminal, with a running server or with a model in this process."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxrun.cli.interrupts import expect_last_signal, wake_main_thread
from mlxrun.cli.options import (
    add_config_options,
    add_model_argument,
    load_command_config,
    name_model,
    say,
)
from mlxrun.cli.server_client import (
    KEY_VARIABLE,
    ServerClient,
    explain_refusal,
    find_server,
    make_client,
)
from mlxrun.core.terminal import open_console

if TYPE_CHECKING:
    from mlxrun.cli.chat.session import ChatSession
    from mlxrun.config.settings import ModelSettings

ASK_TOKENS = 2048  # of the answer to `-p`, where nobody sets them


@click.command(
    epilog="""\b
Examples:
  mlxrun chat                               with a server of this machine, or the built-in model
  mlxrun chat qwen3-4b-4bit                 a model of the hub, or of a folder, in this process
  mlxrun chat --url http://mac.local:8000 --key KEY
  mlxrun chat coder --url http://mac.local:8000   a model of a server that has several
  mlxrun chat -p 'What is in photo.jpg?'    one question; photo.jpg is attached
  cat log.txt | mlxrun chat -p 'What went wrong?'

\b
Without --url, -c, --set and MODEL, the server on port 8000 of this machine answers, else the newest that
`mlxrun ps` lists. Where none runs, the model of mlxrun.yaml does, or the built-in one.

\b
Within it: /help lists the commands. The path of an image, a PDF, a video or a sound in a question attaches
it. Ctrl-C stops an answer. What was typed is kept in ~/.local/share/mlxrun/chat_history.

\b
The answer to -p, or to what is piped in, ends after --max-tokens, else after sampling.max_tokens of the
config, else after 2048 tokens (with a server, after a quarter of the context if that is less). It is said
where an answer was cut. In a conversation there is only the limit of the server; /set max_tokens=N changes
it too.
"""
)
@add_model_argument
@click.option("-p", "--prompt", metavar="TEXT", help="Ask this and end; what is piped in comes before it.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="The most tokens of an answer. Default: 2048 with -p, else what the server has.",
)
@click.option("--url", metavar="URL", help="The server that answers.")
@click.option("--key", metavar="KEY", envvar=KEY_VARIABLE, help=f"Its API key; by default ${KEY_VARIABLE}.")
@click.option("--stats", is_flag=True, help="Show tokens and speed after each answer.")
@add_config_options
def command(
    model: str | None,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    url: str | None,
    key: str | None,
    stats: bool,
    config_path: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Talk with a model at the terminal."""
    from mlxrun.cli.chat.conversation import Conversation
    from mlxrun.cli.chat.session import ChatSession

    if url is not None and (config_path is not None or sets):
        raise click.UsageError("--url names a server, which has its config: give no -c or --set")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a log that is piped in may have bytes that are no text
    is_free = model is None and config_path is None and not sets
    question = _read_question(prompt)
    if is_free and url is None:
        url = find_server(key)
        if url is None and (refusal := explain_refusal(key)) is not None:
            say(f"{refusal}; a model in this process answers")
    with _open_client(url, key, model, config_path, sets, question) as (client, usual):
        limit = max_tokens or usual
        fields = {} if limit is None else {"max_tokens": limit}
        session = ChatSession(client, open_console(), Conversation(system), fields, shows_stats=stats)
        if url is not None and model is not None:
            session.choose_model(model)
        if question is None:
            _converse(session)
        else:
            session.limit_option = "--max-tokens N"
            session.ask(question)


def _read_question(prompt: str | None) -> str | None:
    """What is piped in, and `prompt` after it; None for a conversation. UsageError if there is nothing."""
    if prompt is None and sys.stdin.isatty():
        return None
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    question = "\n\n".join(filter(None, (piped, prompt)))
    if not question.strip():
        raise click.UsageError("there is no question: give -p TEXT, pipe one in, or begin at a terminal")
    return question


@contextmanager
def _open_client(
    url: str | None,
    key: str | None,
    model: str | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    question: str | None,
) -> Iterator[tuple[ServerClient, int | None]]:
    """A client of the server at `url`; without one, of a server in this process. Beside it, the maximum
    number of tokens that a single question has to be sent with. RequestError for a file that the model takes
    not."""
    if url is not None:
        client = make_client(url, key)
        say(f"{client.url}: {', '.join(client.list_models())}")
        context = None if question is None else client.read_context_length()
        yield client, None if question is None else min(ASK_TOKENS, (context or 4 * ASK_TOKENS) // 4)
        return
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.cli.chat.local_server import run_local_server

    remedy = "start `mlxrun serve` with it, and then `mlxrun chat` without -c, --set and MODEL"
    sets = ("log.level=warning", *sets)
    loaded = load_command_config(config_path, sets, name_model(model), remedy=remedy)
    config = loaded.config
    if config.log.level == "warning":
        logging.getLogger("mlxrun.model.model_loading").setLevel(logging.INFO)  # says what takes long
    if question is not None:
        _check_attachments(question, config.model)
        config = replace(
            config, sampling=replace(config.sampling, max_tokens=config.sampling.max_tokens or ASK_TOKENS)
        )
    say(f"loading {config.model.path}")
    with run_local_server(config) as found:
        yield ServerClient(found), None


def _check_attachments(question: str, model: ModelSettings) -> None:
    """RequestError for the first file in the question that the model does not take, before weights are
    loaded."""
    from mlxrun.cli.chat.conversation import find_attachments, find_part

    files = find_attachments(question)
    if not files:
        return
    from mlxrun.api.text.media.media_kinds import MEDIA, MediaRef, check_model_takes
    from mlxrun.cli.run_setup import read_model

    media = {medium.part: medium for medium in MEDIA}
    refs = [MediaRef("", path.name, media[find_part(path)]) for path in files]
    check_model_takes(refs, read_model(model, weights=False, announce=False))


def _converse(session: ChatSession) -> None:
    """Read from the terminal, with what was typed before. Each Ctrl-C ends one answer or one line. SIGTERM,
    and the end of the terminal, end the conversation."""
    from mlxrun.cli.chat.line_history import LineHistory
    from mlxrun.server.data_folder import find_data_folder

    history = LineHistory(find_data_folder(os.environ) / "chat_history")
    history.load()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    is_aborted = False

    def abort(number: int, frame: object) -> None:
        nonlocal is_aborted
        is_aborted = True
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of a terminal may come twice
        expect_last_signal()
        raise click.Abort

    def read_line(prompt: str) -> str:
        if is_aborted:  # in a finaliser, where Python prints an exception and goes on
            raise click.Abort
        return input(prompt)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, abort)
    say("/help lists the commands, Ctrl-D ends")
    try:
        try:
            with wake_main_thread():
                session.run(read_line)
        finally:  # a signal that came with the end of the input is handled here
            signal.signal(signal.SIGINT, before)
    finally:
        history.save()
