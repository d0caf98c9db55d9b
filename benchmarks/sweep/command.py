"""`python -m benchmarks sweep`: checks families of models, shows progress, and prints a table."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import click

from benchmarks.sweep.family import FamilyResult
from mlxrun.core.terminal import print_json, print_line, print_text

LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm")


def run_sweep_command(
    names: Sequence[str], *, as_json: bool, markdown: bool, jobs: int = 1, resume: Path | None = None
) -> int:
    """Sweep these families, or all; 1 if one gives wrong answers. UsageError for a name that is not known.
    `jobs`: see `run_sweep`; `resume`: a file of results, of which none is found again."""
    if as_json and markdown:
        raise click.UsageError("--json and --markdown exclude each other")
    from benchmarks.sweep.layers import find_all_layers
    from benchmarks.sweep.sweep import list_families, run_sweep
    from benchmarks.sweep.table import WORDS, render_markdown, summarize
    from mlxrun.model.machine.versions import list_library_versions
    from tools.docs_site.prose import wrap_page

    known = list_families()
    unknown = sorted(set(names) - {family for _, family in known})
    if unknown:
        raise click.UsageError("; ".join(_explain_unknown(name, known) for name in unknown))
    chosen = [entry for entry in known if not names or entry[1] in names]
    libraries = list_library_versions()
    versions = {str(name): version for name, version in libraries.items() if name in LIBRARIES}
    found = {(result.kind, result.family): result for result in read_results(resume, versions)}
    left = [entry for entry in chosen if entry not in found]
    for number, result in enumerate(run_sweep(left, jobs), 1 + len(chosen) - len(left)):
        found[result.kind, result.family] = result
        add_result(resume, versions, result)
        why = f": {result.why}" if result.why else ""
        line = f"{number}/{len(chosen)} {result.kind} {result.family}: {WORDS[result.status]}{why}"
        print_line(line, sys.stderr if as_json or markdown else None)
    results = [found[entry] for entry in chosen]
    if as_json:
        families = [result.to_json() for result in results]
        print_json({"format": 1, "versions": versions, "families": families})
    elif markdown:
        layered = [entry for entry in chosen if entry[0] != "audio"]
        with redirect_stdout(sys.stderr):  # what libraries print is not part of the page
            layers = find_all_layers(layered)
        print_text(wrap_page(render_markdown(results, versions, layers)))
    else:
        print_line(summarize(results))
    return int(any(result.status == "wrong" for result in results))


def read_results(file: Path | None, versions: Mapping[str, str]) -> Iterator[FamilyResult]:
    """What `add_result` wrote with these versions of the libraries."""
    for line in file.read_text().splitlines() if file is not None and file.exists() else ():
        values = json.loads(line)
        if values.pop("versions") == versions:
            yield FamilyResult(**values)


def add_result(file: Path | None, versions: Mapping[str, str], result: FamilyResult) -> None:
    """Add a line to the file, if there is one."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps({"versions": versions, **result.to_json()}) + "\n")


def _explain_unknown(name: str, known: Sequence[tuple[str, str]]) -> str:
    """Why a name is no family of the sweep, with the closest one."""
    close = difflib.get_close_matches(name, dict.fromkeys(family for _, family in known), 1)
    text = f"no such family in the installed libraries: {name}"
    return f"{text}; did you mean {close[0]}?" if close else text
