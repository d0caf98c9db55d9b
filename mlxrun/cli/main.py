"""`mlxrun`: runs a command, and turns what it raises into a message and an exit code.

Commands are imported when they are called, so that `mlxrun --help` is fast. A command returns its exit code,
or None for 0. A MlxrunError is a message for the user; anything else is a bug and shows its traceback.

A process that has loaded MLX ends after all functions of atexit, and before the interpreter shuts down.
Thread.join returns before the C++ thread_local destructors of MLX's threads have run. If they lose the race
with the interpreter's shutdown, the process aborts (134) whatever its exit code was.
"""

from __future__ import annotations

import atexit
import difflib
import errno
import faulthandler
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from mlxrun import __version__
from mlxrun.cli import INTERRUPTED_EXIT
from mlxrun.cli.interrupts import handle_interrupts
from mlxrun.cli.options import list_first
from mlxrun.core.errors import MlxrunError, is_out_of_memory
from mlxrun.core.terminal import (
    escape_unknown_characters,
    filter_streams,
    open_closed_streams,
    print_error,
)
from mlxrun.core.visible_text import make_message

USAGE_EXIT = 2
BUG_EXIT = 3
SHOWN_PROBLEMS = 100  # of a config or a job; the others are counted

# The commands, each in a module of its name, and their lines in `mlxrun --help`.
COMMANDS = {
    "serve": "Serve a model over HTTP, as OpenAI, Anthropic and Ollama do.",
    "chat": "Talk with a model at the terminal.",
    "batch": "Run a batch job from a JSONL file, or resume it.",
    "job": "Make job files from CSV, JSONL or Parquet tables.",
    "eval": "Run a suite: models x tasks x seeds, resumable, with one manifest.",
    "tasks": "List the standard tasks of `mlxrun eval --tasks`.",
    "score": "Score the answers of a run again, by other rules or a judge.",
    "verify": "Check that a run is as it was written, and run lines again.",
    "replay": "Run a job again as its manifest says, and compare the bytes.",
    "bundle": "Write a run or a suite as one file that is replayed anywhere.",
    "report": "Write an HTML or Markdown report of runs.",
    "view": "Serve all runs of a folder as pages, live while they run.",
    "export": "Write a run in the format of Inspect, lm-eval and others.",
    "compare": "Compare the scores of runs of the same lines, and rank them.",
    "history": "Note the scores of nightly runs in a file, and find drift.",
    "config": "Check, show and create config files.",
    "cache": "List, verify and delete entries of the prefix cache, and warm it.",
    "doctor": "Check this machine and the model.",
    "bench": "Measure the engine, against its peers too.",
    "pull": "Download a model from the hub, and say first what it is.",
    "ps": "List the servers that run on this machine.",
    "stop": "Stop a server that runs on this machine.",
    "service": "Run a server as a service of systemd or launchd.",
    "list": "List the models in the local cache of the hub.",
    "show": "Show what a model is: its architecture, size, context and licence.",
    "fit": "Tell whether a model fits in memory, before it is downloaded.",
    "rm": "Remove a model from the local cache of the hub.",
}
# What other programs call them.
HABITS = {"run": "chat", "generate": "chat", "start": "serve", "models": "list", "download": "pull"}
# The folder of a command's module below mlxrun/cli/commands, where it is not that folder itself.
FOLDERS = dict.fromkeys(("pull", "list", "show", "fit", "rm"), "models.") | dict.fromkeys(
    ("score", "verify", "replay", "bundle", "report", "view", "export", "compare", "history"), "runs."
)

EPILOG = """\b
Examples:
  mlxrun serve                                    the built-in model on http://127.0.0.1:8000
  mlxrun serve qwen3-8b-4bit                      a model of the hub, downloaded first
  mlxrun fit qwen3-8b-4bit                        whether it fits in memory, and how many requests
  mlxrun serve -c prod.yaml                       the model of a config file
  mlxrun chat                                     talk with the server's model, or the built-in one
  mlxrun batch jobs/eval.jsonl                    run a job on the built-in model
  mlxrun batch jobs/eval.jsonl -c prod.yaml       the same on the model of a config file
  mlxrun eval jobs/suite.yaml                     every model of a suite on every task, as a matrix of scores
  mlxrun report jobs/eval.jsonl                   look at scores, failures, speed and every line of a run
  mlxrun view jobs                                all runs of a folder in a browser, live
  mlxrun job make data.csv --template t.jinja     make a job from a table
  mlxrun config init mlxrun.yaml                  write a config file with every key explained
  mlxrun config check prod.yaml                   find all its errors, with line and column
  mlxrun doctor -c prod.yaml                      check this machine and the model of a config file

\b
Exit codes: 0 done; 1 some requests failed; 2 config, job file or usage; 3 engine; 130 interrupted.
"""
OUTPUT_LOST = 3  # exit code if the command succeeded, but the last output could not be written


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        module = f"mlxrun.cli.commands.{FOLDERS.get(cmd_name, '')}{cmd_name}"
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called. The error for an unknown command names the closest one."""
        close = [HABITS[args[0]]] if args[0] in HABITS else difflib.get_close_matches(args[0], COMMANDS, 1)
        if close and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlxrun")
def cli() -> None:
    """Run MLX language and vision models: as a server, or as batch jobs."""


def main(argv: Sequence[str] | None = None, command: click.Command = cli, program: str = "mlxrun") -> int:
    """Run a command line and return its exit code. Without `argv` it is the process's own command line. The
    process then ends with that code (see main.py). It treats SIGTERM like Ctrl-C, unless the command handles
    it: a model may still be loading or downloading."""
    process_exit = None
    if argv is None:
        open_closed_streams()
        escape_unknown_characters()
        process_exit = ProcessExit()
        handle_interrupts()
        with suppress(RuntimeError, ValueError, OSError):  # standard error is no file
            faulthandler.enable()  # a crash inside a library shows where each thread was
    with filter_streams():
        code = _run(argv, command, program)
    if process_exit is not None:
        process_exit.code = code
    return code


def _run(argv: Sequence[str] | None, command: click.Command, program: str) -> int:
    """Run the command and turn exceptions into exit codes; no exception leaves this function."""
    try:
        result = command.main(args=argv, prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        if not isinstance(error, click.exceptions.NoArgsIsHelpError):  # whose message is our own help
            vars(error)["message"] = make_message(error.message)  # it has arguments, and names of files in it
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print_error("mlxrun: interrupted")
        return INTERRUPTED_EXIT
    except Exception as error:
        return report_error(error)
    return result if isinstance(result, int) else 0


def report_error(error: Exception) -> int:
    """Print the error to standard error and return the exit code."""
    if isinstance(error, MlxrunError):
        shown = [f"mlxrun: {text}" for text in error.problems or (str(error),)]
        for line in list_first(shown, SHOWN_PROBLEMS):
            print_error(line)
        return error.exit_code
    if is_out_of_memory(error):  # of this process: a shortage of the device fails requests
        print_error(f"mlxrun: out of memory: {_describe(error)}{_describe_limits()}")
        return BUG_EXIT
    if isinstance(error, OSError):  # standard output cannot be written, or a file has disappeared
        if isinstance(error, FileNotFoundError) and not _has_working_directory():
            print_error("mlxrun: the working directory has been removed; change to another one")
            return USAGE_EXIT
        print_error(f"mlxrun: {_describe_os_error(error)}")
        return USAGE_EXIT if error.errno == errno.ENAMETOOLONG else BUG_EXIT  # no file has such a path
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "mlx":
        advice = "pip install mlx (Linux: 'mlx[cpu]' or 'mlx[cuda13]'); `mlxrun doctor` says more"
        print_error(f"mlxrun: MLX cannot be imported: {error}; {advice}")
        return BUG_EXIT
    traceback.print_exception(error)
    print_error("mlxrun: this is a bug in mlxrun; the traceback is above")
    return BUG_EXIT


def _has_working_directory() -> bool:
    with suppress(FileNotFoundError):
        return bool(os.getcwd())
    return False


def _describe_os_error(error: OSError) -> str:
    """The file or the stream, and the reason."""
    return str(error) if None in (error.filename, error.strerror) else f"{error.filename}: {error.strerror}"


def _describe(error: Exception) -> str:
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def _describe_limits() -> str:
    """What the limits of this process leave, if they were read before: now there is no memory to import."""
    limits = sys.modules.get("mlxrun.model.machine.memory_limits")
    return "".join(f"; {limit.describe()}" for limit in limits.list_limits()) if limits else ""


class ProcessExit:
    """Ends the process with `code`; None: the interpreter ends it, as without MLX. Create this before any
    import that registers with atexit, as the first function is called last."""

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._exit)

    def _exit(self) -> None:
        if self.code is None or "mlx.core" not in sys.modules:
            return
        logging.shutdown()  # logging may have registered before this object did
        os._exit(self.code if _flush_streams() else self.code or OUTPUT_LOST)


def _flush_streams() -> bool:
    """Flush standard output and standard error; return whether that worked."""
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:  # the disk is full, or the reader has closed the pipe
            good = False
            if stream is sys.stdout:
                os.write(2, f"mlxrun: standard output: {error.strerror}\n".encode())
    return good
