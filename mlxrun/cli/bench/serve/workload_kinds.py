"""The workloads of `mlxrun bench serve` by name."""

from __future__ import annotations

from mlxrun.cli.bench.serve.chats import make_chat_kind
from mlxrun.cli.bench.serve.interactive import INTERACTIVE
from mlxrun.cli.bench.serve.long_prompt import LONG
from mlxrun.cli.bench.serve.rounds import WorkloadKind
from mlxrun.cli.bench.serve.workloads import WORKLOADS

KINDS: dict[str, WorkloadKind] = {
    **{name: make_chat_kind(name) for name in WORKLOADS},
    "long": LONG,
    "interactive": INTERACTIVE,
}
