"""`mlxrun`: finds the command, and turns whatever it raises into a message and an exit code.

Commands are imported when they are called, so `mlxrun --help` costs nothing. A command returns its exit
code, or None for 0. A MlxrunError is a sentence for the user; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Sequence

import click

from mlxrun import __version__
from mlxrun.cli.process_exit import ProcessExit
from mlxrun.errors import MlxrunError

INTERRUPTED = 130
BUG = 3

# name: (where the command is, what it does, as `mlxrun --help` shows it)
COMMANDS = {
    "serve": ("mlxrun.cli.serve:command", "Serve a model over HTTP, as OpenAI and Anthropic do."),
    "batch": ("mlxrun.cli.batch:command", "Run a JSONL job; run it again and it goes on where it was."),
    "config": ("mlxrun.cli.config:command", "Check, show and start config files."),
    "cache": ("mlxrun.cli.cache:command", "List, check and delete the prefixes that are kept on disk."),
    "doctor": ("mlxrun.cli.doctor:command", "Say what this machine has and what the model passes."),
    "bench": ("mlxrun.cli.bench:command", "Measure the engine, against its peers too."),
}

EPILOG = """\b
Examples:
  mlxrun serve                                    the built-in model on http://127.0.0.1:8000
  mlxrun serve -c prod.yaml                       yours, as the file says
  mlxrun batch jobs/eval.jsonl                    run a job on the built-in model
  mlxrun batch jobs/eval.jsonl -c prod.yaml       the same on yours
  mlxrun config init mlxrun.yaml                  start a config, every key explained
  mlxrun config check prod.yaml                   all its errors, with line and column
  mlxrun doctor -c prod.yaml                      what this machine and this model can do

\b
Exit codes: 0 done; 1 some requests failed; 2 config, job file or usage; 3 engine; 130 interrupted.
"""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called; of one that is not there the nearest is named."""
        close = difflib.get_close_matches(args[0], COMMANDS, 1)
        if close and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlxrun")
def cli() -> None:
    """Run MLX language and vision models as a YAML file describes."""


def main(argv: Sequence[str] | None = None, command: click.Command = cli, program: str = "mlxrun") -> int:
    """Run one command line and return its exit code. Without `argv` it is the process's own, which then ends
    with that code (see process_exit.py)."""
    way_out = ProcessExit() if argv is None else None
    code = _run(argv, command, program)
    if way_out is not None:
        way_out.code = code
    return code


def _run(argv: Sequence[str] | None, command: click.Command, program: str) -> int:
    """The one border where errors end."""
    try:
        result = command.main(args=argv, prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("mlxrun: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # the last border: nothing above it could log this
        return tell(error)
    return result if isinstance(result, int) else 0


def tell(error: Exception) -> int:
    """Say on standard error why a command ends; its exit code."""
    if isinstance(error, MlxrunError):
        for line in str(error).splitlines():  # a config or a job can have several
            print(f"mlxrun: {line}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError):  # standard output is full or gone, or a file vanished
        print(f"mlxrun: {error}", file=sys.stderr)
        return BUG
    traceback.print_exception(error)
    print("mlxrun: this is a bug in mlxrun; the lines above say where", file=sys.stderr)
    return BUG


if __name__ == "__main__":
    sys.exit(main())
