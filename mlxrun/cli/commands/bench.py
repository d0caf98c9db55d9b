"""`mlxrun bench`: tables go to standard output, progress to standard error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mlxrun.cli import INTERRUPTED_EXIT
from mlxrun.cli.bench.engine.benchmark import OURS, EnginePlan, run_engine_bench
from mlxrun.cli.bench.engine.workloads import DEFAULT_WORKLOADS, WORKLOADS
from mlxrun.cli.bench.models import PRESETS, write_chat_model
from mlxrun.cli.bench.report import print_report, write_json_file, write_report
from mlxrun.cli.bench.serve.benchmark import KINDS, print_serve_report, run_serve_bench
from mlxrun.cli.bench.serve.family_report import FAMILIES
from mlxrun.cli.bench.serve.machine_report import (
    ReportPlan,
    make_empty_report,
    print_machine_report,
    run_machine_report,
)
from mlxrun.cli.bench.serve.streaming_client import LoadPattern, Target
from mlxrun.cli.bench.serve.workloads import PromptSize, ServePlan
from mlxrun.cli.options import (
    F,
    FiniteRange,
    add_config_options,
    add_json_option,
    add_measure_options,
    load_command_config,
    make_repeat_option,
    say,
)
from mlxrun.config.nodes import ConfigProblem
from mlxrun.core.errors import ConfigError
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig

MOVED = {"cache": "prefix-cache", "masks": "structured-output", "parsers": "parsers"}


class BenchGroup(click.Group):
    """Refuses the old names of benchmarks that have moved."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. A benchmark that has moved is an error with its new name."""
        if args[0] in MOVED:
            new = f"python -m benchmarks {MOVED[args[0]]}"
            ctx.fail(f"`mlxrun bench {args[0]}` is now called `{new}`, in a checkout")
        return super().resolve_command(ctx, args)


@click.group(name="bench", cls=BenchGroup)
def command() -> None:
    """Measure the engine and running servers, beside their peers.

    Benchmarks of single parts (the prefix cache, structured output, the parsers) are in the repository:
    `python -m benchmarks --help` in a checkout.
    """


EPILOG = """\b
Examples:
  mlxrun bench serve --url http://127.0.0.1:8000/v1
  mlxrun bench serve --url ours=http://127.0.0.1:8000/v1 --url peer=http://127.0.0.1:8081/v1
  mlxrun bench serve --url http://127.0.0.1:8000/v1 --workload shared --rate 5 --json out.json
  mlxrun bench serve --url http://127.0.0.1:8000/v1 --workload long --long-words 4000
"""
REPORT_EPILOG = """\b
Examples:
  mlxrun bench report                                              the embedded model
  mlxrun bench report --set model.path=Qwen/Qwen3-0.6B --json m4-max.json
  mlxrun bench report -c big.yaml --requests 30
"""


def _make_count_option(name: str, default: int, text: str) -> Callable[[F], F]:
    return click.option(name, default=default, show_default=True, type=click.IntRange(1), help=text)


_prompt_words = _make_count_option("--prompt-words", 180, "Words in each prompt.")


@command.command(name="serve", short_help="Measure running servers with streaming chats.", epilog=EPILOG)
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    metavar="[NAME=]URL",
    help="URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1 or 127.0.0.1:8000. Give it "
    "again for each further server.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="May be given several times; default: chat.",
)
@click.option("--model", help="Model name to send; default: the first one that the server lists.")
@click.option(
    "--key-env", metavar="NAME", help="Environment variable with the API key; it is sent to every server."
)
@click.option(
    "--concurrency",
    default=16,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Number of requests that run at the same time.",
)
@click.option(
    "--rate",
    type=FiniteRange(0, min_open=True),
    help="Send this many requests per second at random times, whether or not the server keeps up, instead "
    "of --concurrency.",
)
@_make_count_option("--requests", 64, "Number of requests in each round.")
@_prompt_words
@_make_count_option("--output-tokens", 32, "Maximum tokens in each answer.")
@_make_count_option(
    "--long-words", 16_000, "Words in the long prompt of the workloads `long` and `interactive`."
)
@click.option(
    "--pages",
    default=0,
    type=click.IntRange(0, 1000),
    help="Pages of a PDF that is the long prompt of the workload `interactive`, instead of words.",
)
@make_repeat_option("Number of rounds; medians are shown.")
@click.option(
    "--seed",
    default="0",
    show_default=True,
    help="Seed of the random words, and of the times at which --rate sends.",
)
@add_json_option
@click.pass_context
def serve(
    context: click.Context,
    /,
    urls: tuple[str, ...],
    workloads: tuple[str, ...],
    key_env: str | None,
    json_path: Path | None,
    **options: Any,
) -> int:
    """Send streaming chats to running servers; measure tok/s, time to first token and inter-token times.

    \b
    chat         every prompt has different words
    shared       the first 90 % of the words are the same in every prompt
    mixed        prompts have a quarter of --prompt-words to four times as many
    image        every prompt has a small picture
    long         how much one long prompt delays streams that are decoding
    interactive  how long a short request waits behind a long prompt, or behind one that is abandoned
    """
    chosen = workloads or ("chat",)
    _check_flags(context, chosen)
    key = os.environ.get(key_env) if key_env is not None else None
    if key_env is not None and not key:
        raise ConfigError(f"--key-env {key_env}: there is no such environment variable")
    named = [_parse_target(url, at) for at, url in enumerate(urls)]
    targets = tuple(Target(name, url, options["model"], key) for name, url in named)
    if len({target.name for target in targets}) < len(targets):
        raise click.UsageError("--url: two servers have one name")
    load = LoadPattern(options["concurrency"], options["rate"], seed=options["seed"])
    sizes = ("prompt_words", "output_tokens", "long_words", "pages")
    size = PromptSize(*(options[name] for name in sizes))
    plan = ServePlan(targets, chosen, size, options["requests"], load, options["repeat"])
    report = run_serve_bench(plan, say)
    write_report(report, json_path, print_serve_report)
    failed = any(side["errors"] for part in report["workloads"].values() for side in part.values())
    return 1 if failed else 0


@command.command(
    name="report", short_help="Measure the server of a config, and write one report.", epilog=REPORT_EPILOG
)
@add_config_options
@_make_count_option("--requests", 32, "Requests at each concurrency.")
@_prompt_words
@_make_count_option("--output-tokens", 128, "Tokens in each answer.")
@_make_count_option("--long-words", 4000, "Words in the long prompt, behind which a short one waits.")
@click.option(
    "--families/--no-families",
    default=True,
    show_default=True,
    help="Check tiny models of ten families too, some minutes; in a checkout.",
)
@add_json_option
def report(
    config_path: Path | None,
    sets: tuple[str, ...],
    requests: int,
    prompt_words: int,
    output_tokens: int,
    long_words: int,
    families: bool,
    json_path: Path | None,
) -> int:
    """Start the server of a config, measure it, and write one report that can be compared with others.

    It sends chats at 1, 8 and 16 requests at a time, and a short request behind a long prompt. Then it
    compares the attention kernel with MLX's own attention, and tiny models of ten families with the library.
    The JSON has what was chosen for the model as well; it names no host and no user. The file is written even
    if the command fails or is interrupted: it has what was measured until then, and why it ended.
    """
    _check_private(load_command_config(config_path, sets))  # before the server starts
    config = () if config_path is None else ("-c", str(config_path))
    # Unless a later --set says otherwise: no log, and nothing of the user's own data folder.
    quiet = ("log.level=warning", "apis.batches=false", "server.store_days=0")
    arguments = (*config, *(part for each in (*quiet, *sets) for part in ("--set", each)))
    size = PromptSize(prompt_words, output_tokens, long_words)
    plan = ReportPlan(arguments, requests, size, families=FAMILIES if families else ())
    report = make_empty_report(plan)

    def save() -> None:
        if json_path is not None and str(json_path) != "-":
            write_json_file(report, json_path)

    try:
        run_machine_report(plan, report, say, save)
    except Exception as error:
        report["error"] = str(error) or type(error).__name__
        raise
    finally:
        write_report(report, json_path, print_machine_report)
    return 1 if any(level["failed"] for level in report["concurrency_results"]) else 0


def _check_private(loaded: LoadedConfig) -> None:
    """ConfigError if a server with this config does not answer everybody on this machine over http."""
    text = "`mlxrun bench report` can measure no server that has them; leave them out of this config"
    given = [f"server.{key}" for key in ("api_keys", "tls") if getattr(loaded.config.server, key)]
    if given:
        raise ConfigError.from_problems(ConfigProblem.at(loaded.origins[k], k, text).text for k in given)


@command.command(
    name="model",
    short_help="Write a chat model of random weights to FOLDER.",
    epilog="""\b
Examples:
  mlxrun bench model /tmp/bm                             a tiny one
  mlxrun bench model /tmp/bm --preset qwen3-0.6b         of the shape of Qwen3-0.6B
  mlxrun serve /tmp/bm                                   then: mlxrun bench serve --url 127.0.0.1:8000
""",
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--preset",
    default="tiny",
    show_default=True,
    type=click.Choice(["tiny", "qwen3-0.6b"]),
    help="Its shape.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63))
def model(folder: Path, preset: str, seed: int) -> int:
    """Write a chat model of random weights to FOLDER, for any server that loads MLX models.

    Its greedy answers never end by themselves, so every server writes as many tokens as it is asked for.
    """
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{folder} is not empty")
    write_chat_model(folder, PRESETS[preset], seed)
    print_line(f"{folder}: {preset}, random weights")
    return 0


def _check_flags(context: click.Context, chosen: tuple[str, ...]) -> None:
    """A flag that no chosen workload uses is an error."""
    for flag in sorted(frozenset().union(*(kind.settings for kind in KINDS.values()))):
        given = context.get_parameter_source(flag) is not ParameterSource.DEFAULT
        if given and not any(flag in KINDS[name].settings for name in chosen):
            users = ", ".join(name for name, kind in KINDS.items() if flag in kind.settings)
            raise click.UsageError(f"--{flag.replace('_', '-')} is for the workloads {users} only")


def _parse_target(value: str, at: int) -> tuple[str, str]:
    """Name and URL; a server without a name is called by its position, and a host alone has http and /v1."""
    name, sign, url = value.partition("=")
    if not sign or "://" in name:
        name, url = f"server {at + 1}", value
    scheme, _, rest = url.rpartition("://")
    host, _, path = rest.partition("/")
    if scheme not in ("", "http", "https") or not host:
        raise click.UsageError(f"--url {value}: expected http://host:port/v1")
    return name, f"{scheme or 'http'}://{host}/{path.strip('/') or 'v1'}"


@command.command(
    name="engine",
    short_help="Measure the engine beside mlx-lm's BatchGenerator.",
    epilog="""\b
Examples:
  mlxrun bench engine                                    a tiny random model, all workloads
  mlxrun bench engine --model qwen3-0.6b --workload ragged
  mlxrun bench engine --model ./my-model --no-peer --workload single --repeat 1
  mlxrun bench engine --scale 0.1 --json engine.json     a tenth of all lengths
""",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(list(WORKLOADS)),
    help="May be given several times; default: all but shared and interactive.",
)
@click.option(
    "--peer/--no-peer",
    default=True,
    show_default=True,
    help="Measure mlx-lm's BatchGenerator too, alternately.",
)
@add_measure_options
def engine(
    model: str,
    workloads: tuple[str, ...],
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Measure mlxrun's engine and mlx-lm's BatchGenerator with the same model and prompts.

    \b
    uniform      32 prompts of 512 tokens
    ragged       1 prompt of 16384 tokens and 31 of 256
    mixed        4 prompts of 8192 tokens, 8 of 2048 and 20 of 512
    staggered    a prompt of 256 tokens every 4 steps, and one of 16384 once 16 requests decode
    few          8 prompts of 512 tokens
    single       1 prompt of 512 tokens
    shared       32 prompts that begin with the same 16384 tokens
    interactive  a prompt of 256 tokens alone, behind one of 16384, and as one of 16384 is abandoned

    Each answer has 128 tokens (256 in staggered, 8 at most in interactive). "times better" is above 1 where
    mlxrun is better. If a side fails, the table and the JSON say so, and all else is measured. The exit code
    is 1 if mlxrun's side failed. Ctrl-C prints the table of the measurements so far (exit code 130).
    """
    config = load_command_config(config_path, sets).config
    plan = EnginePlan(model, workloads or DEFAULT_WORKLOADS, config, **options)
    report = run_engine_bench(plan, say)
    code = write_report(report, json_path, print_report)
    if report.get("incomplete"):
        say("mlxrun: interrupted; the table has what was measured until then")
        return INTERRUPTED_EXIT
    failed = any("error" in part["sides"].get(OURS, {}) for part in report["workloads"].values())
    return 1 if failed else code
