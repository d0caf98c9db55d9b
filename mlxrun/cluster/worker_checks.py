"""Whether a worker may take part in a job: its answers must be those that the first worker would give."""

from __future__ import annotations

from mlxrun.cluster.messages import PROTOCOL, WorkerFacts, WorkerRefused
from mlxrun.jobs.records.manifest_checks import RunEnvironment


def check_worker(facts: WorkerFacts, first: WorkerFacts, *, mixed: bool) -> list[str]:
    """What differs between a worker and the first one, where `mixed` allows it. WorkerRefused if it must not
    be used. A worker with another model or other settings is refused always, as its answers would be kept
    under the keys of this model's."""
    where = f"{facts.host} (process {facts.process})"
    if facts.protocol != PROTOCOL:
        raise WorkerRefused(
            f"{where} has another version of mlxrun, which speaks protocol {facts.protocol} and not "
            f"{PROTOCOL}; install the same version on all machines"
        )
    if facts.model != first.model:
        raise WorkerRefused(f"{where} has other files in the model's folder; copy the same model to it")
    if facts.settings != first.settings:
        raise WorkerRefused(
            f"{where} has other settings that change answers; remove them from workers.overrides, and see "
            "that the tokenizer and the chat template are the same there"
        )
    here, there = (RunEnvironment(each.versions, each.device) for each in (first, facts))
    found = here.list_obstacles(there)
    if found and not mixed:
        raise WorkerRefused(
            f"{where} differs from the driver or the first worker: {'; '.join(found)}. Install the same "
            "versions on machines with the same device, or accept it with --mixed"
        )
    return found
