"""The README of a bundle: what was run, its scores, and the commands that repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxrun.core.visible_text import make_line
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.jobs.scoring.score_groups import format_described

_FACTS = ("name", "backend", "architecture", "libc", "blas", "blas_kernel", "blas_threads", "compile")


def render_readme(name: str, runs: Sequence[RunFolder]) -> str:
    """Render the README of a bundle of these runs, in Markdown."""
    return "\n".join(_render_lines(make_line(name), runs)) + "\n"


def _render_lines(name: str, runs: Sequence[RunFolder]) -> Iterator[str]:
    yield f"# {name}\n"
    are_exact = all(map(_is_reproducible, runs))
    yield f"Runs of mlxrun: {len(runs)}. To repeat them{', byte for byte' if are_exact else ''}:\n"
    yield "```"
    yield f"mlxrun verify {name}.tar.gz --model PATH      # digests, and some lines again"
    yield f"mlxrun replay {name}.tar.gz --model PATH      # all lines again"
    yield "sha256sum -c SHA256SUMS                       # in the unpacked folder: nothing was changed"
    yield "```\n"
    yield "`--model` says where the model's files are; without it they are where they were in the run. Both"
    yield "commands print first what differs here, such as versions, processor and threads."
    yield "environment.txt is a file of requirements for pip. Python functions that score answers are not"
    yield "in a bundle; their names and digests are in the manifests.\n"
    if not are_exact:
        yield "Runs that are not reproducible were made without `engine.reproducible`. Their answers may"
        yield "depend on what else was in the batch, so some of them may come out differently.\n"
    yield "## Runs\n"
    yield "| run | lines | failed | score [95 %] | model | reproducible |"
    yield "|---|---:|---:|---:|---|---|"
    for run in runs:
        yield _render_run(run)
    yield "\n## Models and machine\n"
    yield from dict.fromkeys(text for run in runs for text in _describe_models(run.manifest))
    device = runs[0].manifest.get("device") or {}
    facts = ", ".join(f"{key} {device[key]}" for key in _FACTS if device.get(key) is not None)
    yield make_line(
        f"- computed with mlxrun {runs[0].manifest['versions'].get('mlxrun', 'unknown')}: {facts}"
    )


def _render_run(run: RunFolder) -> str:
    manifest = run.manifest
    score = format_described(run.total_score) if run.total_score else ""
    counts = manifest["counts"]
    cells = (
        run.paths.out.name if run.name == str(run.paths.out) else run.name,
        counts["total"],
        counts["failed"],
    )
    more = (
        score,
        manifest["model"].get("name", ""),
        "yes" if _is_reproducible(run) else "no",
    )
    return "| " + " | ".join(make_line(str(each)).replace("|", "\\|") for each in (*cells, *more)) + " |"


def _is_reproducible(run: RunFolder) -> bool:
    return bool(run.manifest["config"]["engine"]["reproducible"])


def _describe_models(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The model, and the one that plays the user."""
    model, user, config = manifest["model"], manifest.get("user_model"), manifest["config"]["model"]
    revision = f" at {config['revision']}" if config.get("revision") else ""
    yield make_line(f"- {model['path']}{revision}, files with the digest {model['fingerprint']}")
    if user is not None:
        text = f"- of the simulated user (--user-model): {user['path']}"
        yield make_line(f"{text}, files with the digest {user['fingerprint']}")
