"""`mlxrun bench serve`: measures running servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mlxrun.cli.bench.serve.workload_kinds import KINDS
from mlxrun.cli.bench.serve.workloads import PromptSize
from mlxrun.cli.bench_options import write_report
from mlxrun.cli.options import (
    F,
    add_config_options,
    add_json_option,
    interrupt_on_sigterm,
    load_command_config,
    make_repeat_option,
    say,
)
from mlxrun.core.errors import ConfigError
from mlxrun.core.terminal import print_line

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
  mlxrun bench report -c prod.yaml --requests 30
"""


def _make_count_option(name: str, default: int, text: str) -> Callable[[F], F]:
    return click.option(name, default=default, show_default=True, type=click.IntRange(1), help=text)


_prompt_words = _make_count_option("--prompt-words", 180, "Words in each prompt.")


@click.command(name="serve", epilog=EPILOG)
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    metavar="[NAME=]URL",
    help="URL of an OpenAI-compatible server, ending in /v1. Give it again for each further server.",
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
    type=click.FloatRange(0, min_open=True),
    help="Send this many requests per second at random times, whether or not the server keeps up, instead "
    "of --concurrency.",
)
@_make_count_option("--requests", 64, "Number of requests in each round.")
@_prompt_words
@_make_count_option("--output-tokens", 32, "Maximum tokens in each answer.")
@_make_count_option(
    "--long-words", 16_000, "Words in the long prompt of the workloads `long` and `interactive`."
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
def command(
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
    from mlxrun.cli.bench.serve.benchmark import print_serve_report, run_serve_bench
    from mlxrun.cli.bench.serve.rounds import ServePlan
    from mlxrun.cli.bench.serve.streaming_client import LoadPattern, Target

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
    size = PromptSize(options["prompt_words"], options["output_tokens"], options["long_words"])
    plan = ServePlan(targets, chosen, size, options["requests"], load, options["repeat"])
    report = run_serve_bench(plan, say)
    write_report(report, json_path, print_serve_report)
    failed = any(side["errors"] for part in report["workloads"].values() for side in part.values())
    return 1 if failed else 0


@click.command(name="report", epilog=REPORT_EPILOG)
@add_config_options
@_make_count_option("--requests", 100, "Requests at each concurrency.")
@_prompt_words
@_make_count_option("--output-tokens", 128, "Tokens in each answer.")
@_make_count_option("--long-words", 4000, "Words in the long prompt, behind which a short one waits.")
@add_json_option
def report_command(
    config_path: Path | None,
    sets: tuple[str, ...],
    requests: int,
    prompt_words: int,
    output_tokens: int,
    long_words: int,
    json_path: Path | None,
) -> int:
    """Start the server of a config, measure it, and write one report that can be compared with others.

    It sends chats at 1, 8 and 16 requests at a time, and a short request behind a long prompt.
    """
    load_command_config(config_path, sets)  # so that a mistake in it is said before the server starts
    from mlxrun.cli.bench.serve.machine_report import ReportPlan, print_machine_report, run_machine_report

    config = () if config_path is None else ("-c", str(config_path))
    # Unless a later --set says otherwise: no log, and no batches of the user's own data folder.
    quiet = ("log.level=warning", "apis.batches=false")
    arguments = (*config, *(part for each in (*quiet, *sets) for part in ("--set", each)))
    plan = ReportPlan(arguments, requests, PromptSize(prompt_words, output_tokens, long_words))
    with interrupt_on_sigterm():  # so that the server is stopped too
        report = run_machine_report(plan, say)
    write_report(report, json_path, print_machine_report)
    return 1 if any(level["failed"] for level in report["concurrency_results"]) else 0


@click.command(name="model")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--preset",
    default="tiny",
    show_default=True,
    type=click.Choice(["tiny", "qwen3-0.6b"]),
    help="Its shape.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
def model_command(folder: Path, preset: str, seed: int) -> int:
    """Write a chat model of random weights to FOLDER, for any server that loads MLX models.

    Its greedy answers never end by themselves, so every server writes as many tokens as it is asked for.
    """
    from mlxrun.cli.bench.models import PRESETS, write_chat_model

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
    """Name and URL; a server without a name is called by its position."""
    name, sign, url = value.partition("=")
    if not sign or "://" in name:
        name, url = f"server {at + 1}", value
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {value}: expected http://host:port/v1")
    return name, url.rstrip("/")
