"""The conversation at the terminal: reads questions and commands, shows answers as they come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from mlxrun.cli.chat.conversation import Conversation, find_attachments, find_missing
from mlxrun.cli.options import list_first, parse_field, say
from mlxrun.cli.server_client import ClientError, ServerClient
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import MlxrunError
from mlxrun.core.field_errors import suggest

HELP = """\
/help              this list
/new               begin a new conversation
/retry             answer the last question again
/undo              remove the last question and its answer
/system [TEXT]     set or remove the system message
/set FIELD=VALUE   a field of the requests, such as temperature=0.2 or max_tokens=200; /set FIELD= unsets it
/model [NAME]      which model answers; without a name: what there is
/think [on|off]    show or hide reasoning
/stats [on|off]    show or hide tokens and speed
/save FILE         write the conversation as JSON; /load FILE goes on with it
/bye               end; so do /exit, /quit and Ctrl-D
Begin a question with \"\"\" to write several lines, and end it with \"\"\". The path of an image, a PDF,
a video or a sound in a question attaches it. Ctrl-C stops an answer."""
OWN_FIELDS = ("messages", "n", "stream", "stream_options")
END = ("bye", "exit", "quit")  # commands
QUOTES = '"""'
ReadLine = Callable[[str], str]
_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\][\w.]*(?=: )")  # of a message, in a server's error


@dataclass(slots=True)
class ChatSession:
    """One conversation with the server of `client`. `fields`: of each request; `console`: of the answers;
    `limit_option`: how the user sets the maximum number of tokens."""

    client: ServerClient
    console: Console
    conversation: Conversation
    fields: dict[str, Any] = field(default_factory=dict)
    shows_reasoning: bool = True
    shows_stats: bool = False
    limit_option: str = "/set max_tokens=N"

    def run(self, read_line: ReadLine) -> None:
        """Read and answer until the input ends. `read_line`: returns a line, EOFError at the end."""
        for text in _read_texts(read_line):
            try:
                name, _, given = text[1:].partition(" ")
                is_command = name in END or name in self._list_commands()
                is_command = is_command or not (find_attachments(text) or find_missing(f"/{name}"))
                if text.startswith("/") and is_command:
                    if self._obey(name, given.strip()):
                        return
                else:
                    self.ask(text)
            except (MlxrunError, click.UsageError) as error:
                self._note(str(error))

    def ask(self, text: str) -> None:
        """Ask a question and show the answer. ClientError or ConfigError if there is none; the question is
        then forgotten."""
        files = find_attachments(text)
        if files:
            self._note(f"with {', '.join(path.name for path in files)}")
        missing = (f"{name}: no such file, so nothing is attached" for name in find_missing(text))
        for line in list_first(list(missing)):
            say(line)
        self.conversation.ask(text, files)
        try:
            self._answer()
        except ClientError as error:
            text = _name_files(str(error), len(self.conversation.messages) - 1, files)
            self.conversation.undo()
            raise ClientError(text) from error
        except BaseException:
            self.conversation.undo()
            raise

    def _answer(self) -> None:
        """Show the answer to the last question, and add it. Ctrl-C keeps what has come."""
        shown, usage, start = _Shown(self.console, self.shows_reasoning), None, time.monotonic()
        is_cut = False
        try:
            with closing(self.client.stream(self.conversation.messages, self.fields)) as parts:
                for part in parts:
                    shown.add(part.text, part.reasoning)
                    usage, is_cut = part.usage or usage, part.cut or is_cut
        except KeyboardInterrupt:
            shown.end()
            self._note("stopped")
        except ClientError:
            if shown.first is not None:
                shown.end()
            raise
        else:
            shown.end()
        self.conversation.answer(shown.answer)
        if is_cut:
            tokens = "" if usage is None else f" ({usage.get('completion_tokens') or 0:,})"
            say(f"the answer was cut at its maximum number of tokens{tokens}; {self.limit_option} sets it")
        if self.shows_stats and usage is not None:
            self._note(_format_usage(usage, shown.first or time.monotonic(), start))

    def _obey(self, name: str, given: str) -> bool:
        """Run a command; whether it ends the session."""
        commands = self._list_commands()
        if name in END:
            return True
        if name in commands:
            commands[name](given)
        else:
            self._note(f"there is no /{name}{suggest(name, [*commands, 'bye'])}; /help lists what there is")
        return False

    def _list_commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "help": lambda _: self._note(HELP),
            "new": lambda _: self.conversation.turns.clear(),
            "retry": self._retry,
            "undo": lambda _: self.conversation.undo(),
            "system": self._set_system,
            "set": self._set_field,
            "model": self.choose_model,
            "think": lambda word: self._switch("shows_reasoning", word),
            "stats": lambda word: self._switch("shows_stats", word),
            "save": lambda path: self.conversation.save(_make_path(path)),
            "load": lambda path: self.conversation.load(_make_path(path)),
        }

    def _retry(self, _: str) -> None:
        if self.conversation.forget_answer():
            self._answer()

    def _set_system(self, text: str) -> None:
        self.conversation.system = text or None

    def _set_field(self, text: str) -> None:
        if not text:
            self._note(
                ", ".join(f"{name}={value}" for name, value in self.fields.items()) or "nothing is set"
            )
            return
        from mlxrun.api.openai.fields import BODIES

        name, value = parse_field(text.replace(" ", "=", 1) if "=" not in text else text, "/set")
        if name in OWN_FIELDS:
            raise ClientError(f"{name} cannot be set: each request of a chat has its own")
        BODIES["chat"].check({name: value})
        self.fields[name] = value
        if value is None:
            del self.fields[name]

    def choose_model(self, name: str) -> None:
        """Let a model of the server answer from now on; without a name, show what there is. ClientError if
        the server has no such model."""
        names = self.client.list_models()
        if name and name not in names:
            raise ClientError(
                f"the server has no model {name}{suggest(name, names)}; it has {', '.join(names)}"
            )
        if name:
            self.fields["model"] = name
        else:
            self._note("\n".join(names))

    def _switch(self, what: str, word: str) -> None:
        if word not in ("", "on", "off"):
            raise ClientError(f"on or off, not {word}")
        setattr(self, what, word == "on" if word else not getattr(self, what))

    def _note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)


class _Shown:
    """What was shown of an answer. `first`: when its first text came, by time.monotonic."""

    def __init__(self, console: Console, with_reasoning: bool) -> None:
        self._console = console
        self._with_reasoning = with_reasoning
        self._last = ""  # character that was shown
        self._in_reasoning = False
        self.first: float | None = None
        self.answer = ""

    def add(self, text: str, reasoning: bool) -> None:
        """Show a part of the answer, or of its reasoning."""
        if not text:
            return
        self.first = self.first or time.monotonic()
        if self._in_reasoning and not reasoning and self._last:
            self._print("\n\n" if self._last != "\n" else "\n", "")
        self._in_reasoning = reasoning
        if not reasoning:
            self.answer += text
        if self._with_reasoning or not reasoning:
            self._print(text, "dim" if reasoning else "")

    def end(self) -> None:
        """End the line."""
        if self._last != "\n":
            self._print("\n", "")

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        self._last = text[-1]


def _read_texts(read_line: ReadLine) -> Iterator[str]:
    """The questions and commands, without what is empty."""
    while True:
        try:
            text = read_line(">>> ").strip()
            if text.startswith(QUOTES):
                text = _read_quoted(text.removeprefix(QUOTES), read_line)
        except KeyboardInterrupt:  # forgets the line, as a shell does
            continue
        except EOFError:
            return
        if text:
            yield text


def _read_quoted(first: str, read_line: ReadLine) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read_line("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip()


def _name_files(text: str, place: int, files: Sequence[Path]) -> str:
    """Put the names of files into a server's error, for the parts of the message at `place` that they
    became."""

    def name(part: re.Match[str]) -> str:
        message, number = map(int, part.groups())
        return files[number].name if message == place and number < len(files) else part[0]

    return _PART.sub(name, text)


def _make_path(text: str) -> Path:
    if not text:
        raise ClientError("give the path of a file")
    return expand_home(text)


def _format_usage(usage: Any, first: float, start: float) -> str:
    """Tokens and speed of an answer; times are by time.monotonic."""
    prompt, answer = (usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens"))
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    seconds = max(time.monotonic() - first, 1e-6)
    speed = f", {(answer - 1) / seconds:.1f} tokens/s" if answer > 1 else ""
    return (
        f"{prompt} prompt tokens ({reused} reused), first token after {first - start:.2f} s, "
        f"{answer} tokens{speed}"
    )
