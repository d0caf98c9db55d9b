"""The workloads of `mlxrun bench serve`, by name. Light: the command line reads it for its help."""

from __future__ import annotations

from mlxrun.bench.serve.chats import chats
from mlxrun.bench.serve.long_prompt import LONG
from mlxrun.bench.serve.rounds import WorkloadKind
from mlxrun.bench.serve.workloads import WORKLOADS

KINDS: dict[str, WorkloadKind] = {**{name: chats(name) for name in WORKLOADS}, "long": LONG}
