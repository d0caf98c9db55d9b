"""Scores the answers of a run again, without a model: records, journal, scores.json and manifest follow.

The eval keys of the job file may have changed since the run; its requests may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import DONE, RunFolder
from mlxrun.evals.run_folders.run_folder_paths import read_manifest
from mlxrun.jobs.lines.job_file import BadLine
from mlxrun.jobs.lines.line_index import TODO, LineIndex
from mlxrun.jobs.lines.line_keys import LineKeys, digest_settings, make_run_keys
from mlxrun.jobs.records.manifest import count_states, hash_file, write_json, write_scores
from mlxrun.jobs.records.reconciliation import Reconciler
from mlxrun.jobs.records.run_paths import lock_folder
from mlxrun.jobs.scoring.eval_spec import EvalReader
from mlxrun.jobs.scoring.score_groups import Scores


def check_journal(run: RunFolder) -> None:
    """Raise JobError if the journal is missing. Rescoring writes one, whose digests would vouch for records
    that were edited before."""
    if not run.paths.journal.exists():
        raise JobError(
            f"{run.paths.journal}: is missing, so it cannot be seen whether records were edited; nothing "
            "was scored (mlxrun batch writes it anew, and says how many records it could not verify)"
        )


def check_run(run: RunFolder) -> None:
    """Raise JobError if a record was edited or removed, or if a line or an image has changed since its
    answer."""
    check_journal(run)
    bad = [
        each
        for each in run.list_problems()
        if each.kind in ("edited", "mixed", "incomplete") or (each.id and each.kind == "job")
    ]
    if bad:
        rest = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise JobError(f"{bad[0]}{rest}; mlxrun batch runs changed lines again")


def rescore(run: RunFolder, evals: EvalReader, facts: Mapping[str, Any] | None = None) -> Scores:
    """Score all answers of a run again. JobError if the run is not as its job left it. `facts`: what the
    manifest's `scoring` has besides the description of `evals`."""
    paths = run.paths
    check_journal(run)
    with lock_folder(paths.folder):
        run.manifest = manifest = read_manifest(paths.out)  # its job may have gone on since it was opened
        index = LineIndex(paths.job, _make_keys(run), evals=evals)
        with closing(index):
            index.scan()
            # A scorer may have changed in what its digest does not see, such as a module that it imports.
            reconciler = Reconciler(index, paths, score_all=True)
            reconciler.read_journal()
            try:
                found = reconciler.check()
            except JobError:
                _check_evals(index)  # an `eval` that is not valid is the better reason
                raise
            _check_number(run, found)
            state = reconciler.rewrite(digest_settings(manifest["settings"]))
        scoring = {**evals.describe(), **(facts or {})}
        counts = count_states(index, state.scores)
        content = {key: value for key, value in manifest.items() if key != "scoring"}
        content["input"] = {**content["input"], "sha256": index.sha256, "lines": len(index)}
        whole = not index.state.count(TODO)
        content["output"] = {**content["output"], "sha256": hash_file(paths.out) if whole else None}
        content |= {"counts": counts, "scores": state.scores.describe()}
        write_json(paths.manifest, content | ({"scoring": scoring} if scoring else {}))
        write_scores(paths, counts, state.scores)
    return state.scores


def _check_number(run: RunFolder, found: int) -> None:
    """JobError if a finished run has fewer records (`found`) than its manifest counts, as where records and
    their entries in the journal were removed."""
    counts = run.manifest["counts"]
    known = int(counts["done"]) + int(counts["failed"])
    if run.state == DONE and found < known:
        reason = f"{known - found} of {known} records are missing in it or in {run.paths.errors.name}"
        raise JobError(f"{run.paths.out}: {reason}; mlxrun batch runs their lines again")


def _make_keys(run: RunFolder) -> LineKeys:
    """How the run has computed the keys of its lines; a server's batch has its id in them."""
    settings, batch = digest_settings(run.manifest["settings"]), run.manifest.get("batch")
    if batch:
        return make_run_keys(run.manifest, settings, None, batch["batch_id"])
    return make_run_keys(run.manifest, settings, run.paths.job.parent)


def _check_evals(index: LineIndex) -> None:
    """JobError that names the first line whose `eval` is not valid."""
    for position in range(len(index)):
        if index.get_row(position).bad:
            line = index.load(position).line
            if isinstance(line, BadLine) and line.param == "eval":
                raise JobError(f"{index.path}:{line.number}: {line.reason}")
