"""`mlxrun doctor` prints the findings of `mlxrun.model.doctor` about this machine and the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxrun.cli.options import add_config_options, load_command_config, name_model
from mlxrun.core.errors import MlxrunError
from mlxrun.core.terminal import open_console, print_json

if TYPE_CHECKING:
    from mlxrun.config.settings import Config
    from mlxrun.model.machine.versions import Finding

MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "off": "[red]off[/]"}
FORMAT = 1
PIPED_WIDTH = 160
_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)+(?=: )")  # that an error begins with


@click.command(
    name="doctor",
    epilog="""\b
Examples:
  mlxrun doctor                             the machine, and the model of ./mlxrun.yaml or the built-in one
  mlxrun doctor ./my-model                  a folder, a .gguf file, or a model of the hub
  mlxrun doctor -c prod.yaml --no-model     the machine alone
  mlxrun doctor --json | jq '.findings[] | select(.level != "ok")'
""",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--model/--no-model",
    "loads_model",
    default=True,
    show_default=True,
    help="Load the model and run its load check.",
)
@click.argument("model", required=False, metavar="[MODEL]")  # --model is a switch here
@add_config_options
def command(
    as_json: bool, loads_model: bool, model: str | None, config_path: Path | None, sets: tuple[str, ...]
) -> int:
    """Check this machine and the model.

    "note" marks what works but could be better, "off" what must be fixed.
    The exit code is 0, or 1 if something is off. A mistake in the config, such as a model.path that is not
    the folder of a model, ends it with exit code 2. Nothing is checked then.
    """
    config = load_command_config(config_path, sets, name_model(model)).config
    findings = list(list_findings(config, with_model=loads_model))
    good = all(finding.level != "off" for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print_json({"format": FORMAT, "ok": good, "findings": rows})
    else:
        print_findings(findings)
    return 0 if good else 1


def list_findings(config: Config, *, with_model: bool) -> Iterator[Finding]:
    """Yield all findings; about the model only if wanted. If mlx cannot be imported, this is the last
    finding."""
    from mlxrun.model.machine.versions import Finding, check_versions, read_requirements

    yield from check_versions(read_requirements())
    try:
        from mlxrun.model.doctor import check_machine
    except ImportError as error:
        advice = "pip install mlx (Linux: 'mlx[cpu]' or 'mlx[cuda13]')"
        yield Finding("device", "backend", "off", f"mlx cannot be imported: {error}", advice)
        return
    yield from check_machine(config)
    if with_model:
        yield from list_model_findings(config)


def list_model_findings(config: Config) -> Iterator[Finding]:
    """Load the model as the engine does, and yield the findings of its load check. A model that cannot be
    loaded is a finding."""
    from mlxrun.api.text.templates.template import check_template
    from mlxrun.engine.build import build_engine
    from mlxrun.model.doctor import (
        report_drafts,
        report_hooks,
        report_load_check,
        report_model,
        report_pooling,
        report_weights,
    )
    from mlxrun.model.load.model_info import load_model_info
    from mlxrun.model.machine.versions import Finding

    try:
        model_info = load_model_info(config.model, digest=False)
        check_template(model_info, config.model.chat_template)
        yield report_model(config.model.path, model_info)
        check = config.engine.load_check or "always"
        engine = build_engine(replace(config, engine=replace(config.engine, load_check=check)))
    except MlxrunError as error:
        named = _SETTING.match(str(error))
        name = named[0] if named else "model.path"
        shown = config.model.path if name == "model.path" else name
        yield Finding("model", shown, "off", str(error), f"see {name} in the config")
        return
    if engine.load_check is not None:
        yield from report_weights(engine.load_check.weights)
        yield from report_hooks(engine.load_check.hooks)
        yield from report_load_check(engine.load_check)
    if config.speculation.method != "off" and engine.load_check is not None:
        yield report_drafts(engine.scheduler.drafts.describe())
    if engine.pooling is not None and model_info.pooled is not None:
        runner, most = engine.pooling.runner, model_info.pooled.max_tokens
        yield from report_pooling(runner.checks, runner.max_rows, most)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table of the findings by area, and the advice below it."""
    from rich.table import Table
    from rich.text import Text

    console = open_console(width=PIPED_WIDTH)
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    area = ""
    for finding in findings:
        title, area = ("" if finding.area == area else finding.area), finding.area
        mark = Text.from_markup(MARKS[finding.level])
        table.add_row(title, finding.name, mark, finding.value)
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print(f"{finding.name}: {finding.advice}", soft_wrap=True)
