"""The workloads of `mlxrun bench serve` by name."""

from __future__ import annotations

from mlxrun.bench.serve.chats import make_chat_kind
from mlxrun.bench.serve.interactive import INTERACTIVE
from mlxrun.bench.serve.long_prompt import LONG
from mlxrun.bench.serve.rounds import WorkloadKind
from mlxrun.bench.serve.workloads import WORKLOADS

KINDS: dict[str, WorkloadKind] = {
    **{name: make_chat_kind(name) for name in WORKLOADS},
    "long": LONG,
    "interactive": INTERACTIVE,
}
