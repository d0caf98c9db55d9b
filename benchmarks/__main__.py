"""`python -m benchmarks`: measures single parts of mlxrun; run it in a checkout of the repository."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_runs import RUNS, run_all
from benchmarks.install import KINDS as INSTALL_KINDS
from benchmarks.mtp_model import TRAINED
from benchmarks.prefix_cache.workloads import SCENARIOS
from benchmarks.reproduce.benchmark import CONDITIONS
from benchmarks.reproduce.models import FAMILIES as REPRODUCE_FAMILIES
from benchmarks.speculation import LANGUAGE
from benchmarks.speculation import WORKLOADS as DRAFT_WORKLOADS
from mlxrun.cli.bench.report import write_report
from mlxrun.cli.main import main
from mlxrun.cli.options import (
    add_config_options,
    add_json_option,
    add_measure_options,
    load_command_config,
    make_repeat_option,
    say,
)
from mlxrun.config.settings import Config

FAMILIES = ("plain", "windowed", "hybrid", "vision")


@click.group(name="benchmarks", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure single parts of mlxrun: the prefix cache, structured output, the parsers, reproducibility."""


@command.command(name="prefix-cache", short_help="The prefix cache, beside mlx-lm's prompt cache.")
@click.option(
    "--family",
    "families",
    multiple=True,
    type=click.Choice(FAMILIES),
    help="Kind of model; may be given several times; default: all that --model has.",
)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    type=click.Choice(SCENARIOS),
    help="May be given several times; default: all.",
)
@click.option(
    "--peer/--no-peer",
    default=True,
    show_default=True,
    help="Measure mlx-lm's LRUPromptCache too, as its server uses it, in turn.",
)
@add_measure_options
def cache(
    model: str,
    families: tuple[str, ...],
    scenarios: tuple[str, ...],
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Measure requests without and with reuse from the prefix cache, and the same in mlx-lm's prompt cache.

    \b
    repeat        a prompt of 16384 tokens is sent twice
    shared-2k     prompts share 2048 tokens and end with 256 of their own
    shared-16k    prompts share 16384 tokens and end with 256 of their own
    conversation  an agent's 10 turns after a system prompt of 4096 tokens
    alternating   two system prompts of 4096 tokens are used alternately
    image         another question about the same image (vision models)
    nothing       32 different prompts of 512 tokens, with the cache and without
    lookup        only the search in the cache, among 10 and 5000 entries
    """
    config = load_command_config(config_path, sets).config
    from benchmarks.prefix_cache.benchmark import CachePlan, run_cache_bench
    from benchmarks.prefix_cache.models import list_families
    from benchmarks.prefix_cache.report import print_cache_report

    has = list_families(model)
    unknown = [family for family in families if family not in has]
    if unknown:
        raise click.UsageError(f"--family {unknown[0]}: --model {model} is {', '.join(has)}")
    plan = CachePlan(model, families or has, scenarios or SCENARIOS, config, **options)
    report = run_cache_bench(plan, say)
    return write_report(report, json_path, print_cache_report)


@command.command(name="structured-output", short_help="Decoding with JSON schemas.")
@add_measure_options
def masks(
    model: str, json_path: Path | None, config_path: Path | None, sets: tuple[str, ...], **options: Any
) -> int:
    """Measure how fast 16 rows decode when each follows its own JSON schema, and when none does.

    Each prompt has 32 tokens and each answer 256 sampled tokens.
    """
    config = load_command_config(config_path, sets).config
    from benchmarks.measure_plan import MeasurePlan
    from benchmarks.structured_output import (
        print_structured_output_report,
        run_structured_output_bench,
    )

    report = run_structured_output_bench(MeasurePlan(model, config, **options), say)
    return write_report(report, json_path, print_structured_output_report)


@command.command(name="prompt-logprobs", short_help="Logprobs of prompts, beside mlx_lm.evaluate's method.")
@click.option("--http", is_flag=True, help="Measure a server too, with lm-eval's requests.")
@add_measure_options
def scoring(
    model: str,
    http: bool,
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Measure 1000 items of four choices, which share a context of 1000 tokens.

    The peer's method is measured on 50 of them. `--scale` is of the number of items.
    """
    config = load_command_config(config_path, sets).config
    from benchmarks.measure_plan import MeasurePlan
    from benchmarks.prompt_logprobs import (
        print_prompt_logprobs_report,
        run_prompt_logprobs_bench,
    )

    report = run_prompt_logprobs_bench(MeasurePlan(model, config, **options), say, http=http)
    return write_report(report, json_path, print_prompt_logprobs_report)


@command.command(name="reproduce", short_help="The same bytes under all conditions.")
@click.option(
    "--family",
    "families",
    multiple=True,
    type=click.Choice(REPRODUCE_FAMILIES),
    help="Model; may be given several times; default: all.",
)
@click.option(
    "--model",
    "local",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="PATH",
    help="A model folder of your own, instead of the families.",
)
@click.option("--lines", default=2000, show_default=True, type=click.IntRange(8), help="Lines of the job.")
@click.option(
    "--condition",
    "conditions",
    multiple=True,
    type=click.Choice(CONDITIONS),
    help="May be given several times; default: all.",
)
@add_json_option
def reproduce(
    families: tuple[str, ...],
    local: Path | None,
    lines: int,
    conditions: tuple[str, ...],
    json_path: Path | None,
) -> int:
    """Compute the same lines under several conditions, and count the bytes that differ.

    \b
    alone         one request at a time, without a cache, on another engine
    64 wide       64 rows at once
    warm memory   the same lines again, with their prompts in the prefix cache
    shuffled      in another order
    warm disk     again in another engine, with the cache that was left on disk
    preempted     where memory is short (a quarter of the lines, with longer answers)
    1 thread in the environment, 2 threads, 4 threads: `mlxrun batch` with OPENBLAS_NUM_THREADS
    killed        `mlxrun batch`, killed with SIGKILL ten times and continued, with other threads each time
    /v1/batches   a batch of `mlxrun serve`, which is killed and started with other threads halfway
    two Ray workers: `mlxrun batch --ray`
    begun, on Ray, finished: begun by one process, continued by two workers on Ray, finished by another

    The twins have a fault that has to be found. The exit code is 1 if a byte differs, or if no model finds a
    twin; with --model or --family it is enough that one of the twins is found.
    """
    from benchmarks.reproduce.benchmark import ReproducePlan, is_proven, run_reproduce_bench
    from benchmarks.reproduce.report import print_reproduce_report

    plan = ReproducePlan(families or REPRODUCE_FAMILIES, lines, local, conditions or CONDITIONS)
    report = run_reproduce_bench(plan, say)
    write_report(report, json_path, print_reproduce_report)
    return 0 if is_proven(report) else 1


@command.command(name="parsers", short_help="Parsers of tool calls and reasoning.")
@click.option(
    "--parser",
    "parsers",
    multiple=True,
    metavar="NAME",
    help="Parser of tool calls or of reasoning; may be given several times; default: all.",
)
@click.option(
    "--length",
    default=100_000,
    show_default=True,
    type=click.IntRange(1, 10_000_000),
    help="Characters of an answer.",
)
@make_repeat_option("Runs; medians are shown.")
@add_json_option
def parsers(parsers: tuple[str, ...], length: int, repeat: int, json_path: Path | None) -> int:
    """Measure how many characters per second the parsers of tool calls and of reasoning read.

    Answers arrive in chunks of several sizes; a model's token is about 4 characters. No model is loaded.
    """
    from benchmarks.parser_samples import list_parsers
    from benchmarks.parsers import ParsersPlan, print_parsers_report, run_parsers_bench

    known = sorted({name for _, name in list_parsers()})
    unknown = [name for name in parsers if name not in known]
    if unknown:
        raise click.UsageError(f"--parser {unknown[0]}: there are {', '.join(known)}")
    plan = ParsersPlan(parsers, length, repeat)
    report = run_parsers_bench(plan, say)
    return write_report(report, json_path, print_parsers_report)


@command.command(name="embeddings", short_help="Embeddings of mixed lengths, beside mlx-vlm.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="PATH",
    help="Folder of an embedding model; default: random weights of MiniLM-L6's shape.",
)
@click.option("--texts", default=256, show_default=True, type=click.IntRange(2, 100_000), help="Texts.")
@click.option("--seed", default=0, show_default=True, help="Seed of lengths and tokens.")
@make_repeat_option("Turns of all sides; medians are printed.")
@add_json_option
def embeddings(model: Path | None, texts: int, seed: int, repeat: int, json_path: Path | None) -> int:
    """Measure texts of 4 to 160 tokens: each after the one before, and all at once, also in mlx-vlm."""
    from benchmarks.embeddings import print_embedding_report, run_embedding_bench

    report = run_embedding_bench(Config(), None if model is None else str(model), texts, seed, repeat)
    return write_report(report, json_path, print_embedding_report)


@command.command(name="speculation", short_help="Answers with drafted tokens and without.")
@click.option("--rows", multiple=True, type=click.IntRange(1, 4096), help="Several times; default: 1 and 16.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice([*DRAFT_WORKLOADS, LANGUAGE]),
    help="May be given several times; default: all that fit the model.",
)
@click.option(
    "--method", type=click.Choice(["ngram", "draft", "mtp", "auto"]), help="Default: ngram, or draft."
)
@click.option("--draft", help="A draft model: a preset or a folder.")
@click.option(
    "--acceptance",
    default=0.8,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of its predictions that hold, where answers are forced.",
)
@add_measure_options
def speculation(
    model: str,
    rows: tuple[int, ...],
    workloads: tuple[str, ...],
    method: str | None,
    draft: str | None,
    acceptance: float,
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Measure rows that decode with drafts and without, on a GPU.

    \b
    edit          a text of 512 tokens is written again, with an edit every 32 tokens
    prose         512 tokens, of which few have come before
    free          whatever the model says, greedy and sampled; all answers are compared
    language      with --model trained, which is trained first: sampled texts of its language

    With --method mtp, a preset is of mimo's family, and has a head of random weights.
    """
    config = load_command_config(config_path, sets).config
    from benchmarks.measure_plan import MeasurePlan
    from benchmarks.speculation import ROWS, DraftSide, print_speculation_report, run_speculation_bench

    plan = MeasurePlan(model, config, **options)
    side = DraftSide(method or ("draft" if draft else "ngram"), draft, acceptance)
    chosen = workloads or ((LANGUAGE,) if model == TRAINED else DRAFT_WORKLOADS)
    report = run_speculation_bench(plan, rows or ROWS, chosen, say, side)
    return write_report(report, json_path, print_speculation_report)


@command.command(name="kv-quantization", short_help="What quantized keys and values change.")
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rows", default=4, show_default=True, type=click.IntRange(1, 4096))
@click.option("--prompt", default=256, show_default=True, type=click.IntRange(1), help="Tokens of each row.")
@click.option("--steps", default=64, show_default=True, type=click.IntRange(1), help="Tokens decoded.")
@add_json_option
@add_config_options
def kv_quantization(
    text: Path,
    rows: int,
    prompt: int,
    steps: int,
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
) -> int:
    """Decode stretches of a text with keys and values in full, in 8 and in 4 bits, and compare the logits."""
    config = load_command_config(config_path, sets).config
    from benchmarks.kv_quantization import print_kv_report, run_kv_bench

    return write_report(run_kv_bench(config, text, rows, prompt, steps, say), json_path, print_kv_report)


add_draft_option = click.option(
    "--draft",
    default="tiny",
    show_default=True,
    metavar="PRESET|PATH",
    help="The draft model, as in --model.",
)


@command.command(name="sparse-prefill", short_help="Time to the first token of a long prompt.")
@add_draft_option
@click.option(
    "--keep", default=0.2, show_default=True, type=click.FloatRange(0.01, 1), help="Share that is computed."
)
@add_measure_options
def sparse_prefill(
    model: str,
    draft: str,
    keep: float,
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Measure one prompt of 16384 random tokens on an idle engine, with sparse prefill and without."""
    config = load_command_config(config_path, sets).config
    from benchmarks.measure_plan import MeasurePlan
    from benchmarks.sparse_prefill import print_sparse_prefill_report, run_sparse_prefill_bench

    report = run_sparse_prefill_bench(MeasurePlan(model, config, **options), draft, keep, say)
    return write_report(report, json_path, print_sparse_prefill_report)


@command.command(name="sparse-recall", short_help="What answers know of sparse prompts.")
@add_draft_option
@click.option(
    "--sentences", default=250, show_default=True, type=click.IntRange(20, 100_000), help="Of a prompt."
)
@click.option(
    "--secrets", default=1, show_default=True, type=click.IntRange(1, 10), help="Sentences that matter."
)
@click.option("--prompts", default=16, show_default=True, type=click.IntRange(1, 10_000), help="Prompts.")
@click.option(
    "--keep",
    "keeps",
    multiple=True,
    type=click.FloatRange(0.01, 1),
    help="Share that is computed; may be given several times; default: 0.1, 0.2, 0.5 and 1.",
)
@click.option(
    "--model", required=True, type=click.Path(exists=True, file_okay=False), help="Folder of a chat model."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the prompts.")
@add_json_option
@add_config_options
def sparse_recall(
    model: str,
    draft: str,
    sentences: int,
    secrets: int,
    prompts: int,
    keeps: tuple[float, ...],
    seed: int,
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
) -> int:
    """Ask for a word that one of many sentences gives, and count the answers that have it."""
    config = load_command_config(config_path, sets).config
    from benchmarks.measure_plan import MeasurePlan
    from benchmarks.sparse_recall import KEEPS, print_sparse_recall_report, run_sparse_recall_bench

    report = run_sparse_recall_bench(
        MeasurePlan(model, config, repeat=1, seed=seed),
        draft,
        sentences=sentences,
        secrets=secrets,
        prompts=prompts,
        keeps=keeps or KEEPS,
        say=say,
    )
    return write_report(report, json_path, print_sparse_recall_report)


@command.command(name="memory-fit", short_help="The memory that `mlxrun fit` predicts, and what is used.")
@click.argument("shapes", nargs=-1, metavar="[SHAPE]...")
@click.option("--rows", default=6, show_default=True, type=click.IntRange(1, 4096))
@click.option("--prompt", default=600, show_default=True, type=click.IntRange(2), help="Tokens of each row.")
@click.option("--output", default=8, show_default=True, type=click.IntRange(1), help="Tokens decoded.")
@add_json_option
def memory_fit(shapes: tuple[str, ...], rows: int, prompt: int, output: int, json_path: Path | None) -> int:
    """Predict the peak of models of thirteen shapes, load them, run rows, and compare with MLX's own count.

    Without SHAPE, all of them: some 100 to 700 MB each in memory.
    """
    from benchmarks.memory_fit import NAMES, print_fit_report, run_fit_bench

    if unknown := set(shapes) - set(NAMES):
        raise click.UsageError(f"no such shape: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return write_report(
        run_fit_bench(shapes or NAMES, rows, prompt, output, say), json_path, print_fit_report
    )


@command.command(name="decode-layers", short_help="Decode steps with fused layers and without, in turns.")
@click.option("--model", default="tiny", show_default=True, metavar="PRESET", help="As of mlxrun bench.")
@click.option("--rows", multiple=True, type=click.IntRange(1, 4096), help="Several times; default: 1, 8, 32.")
@click.option("--layers", type=click.IntRange(1), help="Only so many; default: all that the preset has.")
@click.option("--context", default=640, show_default=True, type=click.IntRange(2), help="Tokens of each row.")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(1), help="Of each turn.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Medians are shown.")
@add_json_option
def decode_layers(
    model: str, rows: tuple[int, ...], layers: int | None, json_path: Path | None, **options: Any
) -> int:
    """Measure a decode step with the library's layers and with fused ones, with random weights."""
    from benchmarks.decode_layers import print_layers_report, run_layers_bench

    report = run_layers_bench(model, rows or (1, 8, 32), say=say, layers=layers, **options)
    return write_report(report, json_path, print_layers_report)


@command.command(name="decode-modes", short_help="Decode steps with engine.reproducible and without.")
@click.option(
    "--model", default="tiny", show_default=True, metavar="MODEL", help="As of mlxrun bench engine."
)
@click.option("--rows", multiple=True, type=click.IntRange(1, 4096), help="Several times; default: 1, 8, 32.")
@click.option("--context", default=256, show_default=True, type=click.IntRange(2), help="Tokens of each row.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(1), help="Of each turn.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Medians are shown.")
@add_json_option
def decode_modes(model: str, rows: tuple[int, ...], json_path: Path | None, **options: Any) -> int:
    """Measure a decode step of both modes in turns, by processor time."""
    from benchmarks.decode_modes import print_modes_report, run_modes_bench

    report = run_modes_bench(Config(), model, rows or (1, 8, 32), say=say, **options)
    return write_report(report, json_path, print_modes_report)


@command.command(name="waiting", short_help="A short prompt behind a long one, by the length of steps.")
@click.option(
    "--model", default="tiny", show_default=True, metavar="MODEL", help="As of mlxrun bench engine."
)
@click.option(
    "--long", default=8192, show_default=True, type=click.IntRange(2), help="Tokens of that prompt."
)
@click.option("--short", default=200, show_default=True, type=click.IntRange(2), help="Tokens of the other.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Medians are shown.")
@add_json_option
def waiting(model: str, json_path: Path | None, **options: Any) -> int:
    """Measure the first token of a short prompt alone and behind a long one."""
    from benchmarks.waiting import print_waiting_report, run_waiting_bench

    report = run_waiting_bench(Config(), model, say=say, **options)
    return write_report(report, json_path, print_waiting_report)


@command.command(name="busy-cores", short_help="Beside other programs on a CPU, by BLAS threads.")
@click.option(
    "--model", default="tiny", show_default=True, metavar="MODEL", help="As of mlxrun bench engine."
)
@click.option(
    "--others",
    multiple=True,
    type=click.IntRange(0),
    default=(0, 1, 2),
    show_default=True,
    help="Programs that compute beside it; may be given several times.",
)
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Medians are shown.")
@add_json_option
def busy_cores(model: str, json_path: Path | None, **options: Any) -> int:
    """Measure a small batch beside other programs, with all threads of OpenBLAS and with those that fit."""
    from benchmarks.busy_cores import print_busy_cores_report, run_busy_cores_bench

    report = run_busy_cores_bench(Config(), model, say=say, **options)
    return write_report(report, json_path, print_busy_cores_report)


@command.command(name="gpu", short_help="All figures of README and docs/ that come from a GPU.")
@click.option(
    "--run", "names", multiple=True, type=click.Choice([run.name for run in RUNS]), help="Only these."
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("benchmarks/results"),
    show_default=True,
    help="The folder for the JSON.",
)
def gpu(names: tuple[str, ...], results: Path) -> int:
    """Measure on this machine's GPU what the tables show. It takes a quarter of an hour on an H200.

    The exit code is 1 if a run failed or took too long; its JSON then has what was measured until then.
    Afterwards, `python -m benchmarks.tables` and `make plots` show the new figures.
    """
    failed = run_all([run for run in RUNS if not names or run.name in names], results, say)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return int(bool(failed))


@command.command(name="coverage", short_help="Whether 95 % intervals of pooled seeds are true.")
@click.option("--suites", default=4000, show_default=True, type=click.IntRange(10), help="Of each shape.")
@click.option("--seed", default=0, show_default=True, help="Of the simulation.")
@add_json_option
def coverage(suites: int, seed: int, json_path: Path | None) -> int:
    """Simulate suites with several seeds, and count how often the interval has the true score in it."""
    from benchmarks.coverage import print_coverage, run_coverage

    return write_report(run_coverage(suites, seed, say), json_path, print_coverage)


@command.command(name="install", short_help="Size and time of an installation, and of a first answer.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(INSTALL_KINDS),
    help="What is installed; may be given several times; default: all.",
)
@add_json_option
def install(kinds: tuple[str, ...], json_path: Path | None) -> int:
    """Install this checkout into fresh environments from the package index, and ask the built-in model."""
    from benchmarks.install import print_install_report, run_install_bench

    return write_report(run_install_bench(kinds or INSTALL_KINDS, say), json_path, print_install_report)


@command.command(name="ui-cost", short_help="A server under load, with its page open and without.")
@click.option("--streams", default=4, show_default=True, type=click.IntRange(1), help="Requests at a time.")
@click.option("--requests", default=32, show_default=True, type=click.IntRange(1), help="Of each turn.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(1), help="Of each answer.")
@click.option("--turns", default=9, show_default=True, type=click.IntRange(1), help="Of each side.")
@click.option("--browser/--no-browser", default=True, help="Show the page in a Chromium too.")
@add_json_option
def ui_cost(browser: bool, json_path: Path | None, **options: int) -> int:
    """Measure answers of the built-in model while nobody looks at the page, while its requests are sent, and
    while a Chromium shows it, in turns."""
    from benchmarks.browser import find_browser
    from benchmarks.ui_cost import print_ui_report, run_ui_bench

    found = find_browser() if browser else None
    report = asyncio.run(run_ui_bench(browser=found, say=say, **options))
    return write_report(report, json_path, print_ui_report)


@command.command(name="sweep", short_help="Which families of models are computed exactly.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--markdown", is_flag=True, help="Print the results as docs/models.md has them.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Families at a time.")
@click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file of results: those of these versions are not found again, and new ones are added.",
)
@click.argument("families", nargs=-1, metavar="[FAMILY]...")
def sweep(as_json: bool, markdown: bool, jobs: int, resume: Path | None, families: tuple[str, ...]) -> int:
    """Check families of models (the model_type in config.json) against the libraries' own loop.

    Each is a tiny random model, in a process of its own; without FAMILY all that the libraries have (half an
    hour). The exit code is 1 if one gives wrong answers.
    """
    from benchmarks.sweep.command import run_sweep_command

    return run_sweep_command(families, as_json=as_json, markdown=markdown, jobs=jobs, resume=resume)


if __name__ == "__main__":
    sys.exit(main(command=command, program="python -m benchmarks"))
