"""The import table of the packages, checked in the source; and what light commands leave unimported."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import mlxrun
from tests.helpers.command_processes import run_program

ROOT = Path(mlxrun.__file__).parent

# package: what it may import besides itself and mlxrun. A dotted name is one module, or a package in one: its
# own row goes before that of the package around it.
BASE = {"core", "config"}
FRONT_END = BASE | {"api", "engine.client"}
EVERYTHING = BASE | {"model", "engine", "api", "jobs", "server", "evals", "cluster"}
TABLE: dict[str, set[str]] = {
    "core": set(),
    "config": {"core"},
    "model": BASE,
    "engine": BASE | {"model"},
    "engine.scheduler": BASE,
    "engine.prefix_cache": BASE | {"engine.scheduler"},
    "api": BASE,
    "api.parsers": BASE,
    "api.text": BASE | {"api.parsers"},
    "api.structured": BASE | {"api.parsers", "api.text"},
    "jobs": FRONT_END,
    "jobs.scoring": BASE,
    "server": FRONT_END | {"jobs.run.job_service", "jobs.records.run_paths"},
    "evals": FRONT_END | {"jobs"},
    "evals.harnesses": BASE | {"api", "model", "engine", "jobs"},
    "cluster": BASE | {"api", "model", "engine", "jobs", "server"},
    "cli": EVERYTHING,
    "cli.bench": EVERYTHING,
    "__main__": {"cli.entry"},
}
# Who may import mlx, mlx_lm, mlx_vlm: the model package, and the peers and random models of the bench.
MLX = (
    "mlxrun.model",
    "mlxrun.cli.bench.engine.mlx_lm_contender",
    "benchmarks.prefix_cache.mlx_lm_side",
    "mlxrun.cli.bench.models",
)
# Programs that load the adapters in harnesses/, and so are there when these run; they are no dependencies.
HARNESSES = {"inspect_ai", "lm_eval"}
# No dependency at all beyond the standard library.
PURE = (
    "engine.scheduler",
    *(f"core.{name}" for name in ("errors", "request", "step_plan")),
    *(f"core.{name}" for name in ("draft_source", "memory_budget")),
)
LAZY = {"mlx", "mlx_lm", "mlx_vlm", "transformers", "aiohttp", "PIL", "numpy"}


@functools.cache
def read_imports() -> Mapping[str, Sequence[str]]:
    """What every module imports, by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = list(imported(name, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Every module that a module imports, at the top or inside functions, as an absolute name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, package: str) -> bool:
    """Whether a module is the package or in it."""
    return f"{name}.".startswith(f"{package}.")


def find_row(module: str) -> str:
    """The row of the table for a module, below mlxrun: the longest package that it is in."""
    return max((package for package in TABLE if is_within(module, package)), key=len)


def is_allowed(name: str, target: str) -> bool:
    """Whether the table lets module `name` import `target`; both dotted, below mlxrun."""
    module, wanted = name.partition(".")[2], target.partition(".")[2]
    if not module or not wanted or wanted == "__version__":
        return True
    row = find_row(module)
    return any(is_within(wanted, entry) for entry in TABLE[row] | {row})


def test_imports_run_one_way() -> None:
    """Core < config < model < engine < api < jobs < server, evals < cluster < cli."""
    wrong = [
        f"{name} imports {target}"
        for name, targets in read_imports().items()
        for target in targets
        if target.split(".")[0] == "mlxrun" and not is_allowed(name, target)
    ]
    assert wrong == []


def test_the_table_knows_every_package() -> None:
    packages = {name.split(".")[1] for name in read_imports() if "." in name}
    assert packages == {package for package in TABLE if "." not in package}


def test_the_table_forbids() -> None:
    """The rule itself: a mistake of each kind is seen."""
    assert not is_allowed("mlxrun.engine.scheduler.waiting_queue", "mlxrun.engine.client.EngineClient")
    assert not is_allowed("mlxrun.jobs.run.line_runner", "mlxrun.engine.engine.Engine")
    assert not is_allowed("mlxrun.jobs.run.line_runner", "mlxrun.server.app")
    assert not is_allowed("mlxrun.api.openai.request", "mlxrun.engine.scheduler.scheduler.Scheduler")
    assert is_allowed("mlxrun.api.openai.request", "mlxrun.core.request.Request")
    assert is_allowed("mlxrun.jobs.run.line_runner", "mlxrun.engine.client.EngineClient")


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """A cycle of modules, its first one again at its end; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_cycles() -> None:
    """Not within a package either, and not for annotations only."""
    known = read_imports()
    graph: dict[str, set[str]] = {}
    for name, targets in known.items():
        graph[name] = {t if t in known else t.rpartition(".")[0] for t in targets} & known.keys() - {name}
    assert find_cycle(graph) == []


def test_a_cycle_is_seen() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_only_the_model_package_imports_mlx() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in read_imports().items()
        for target in targets
        if target.split(".")[0] in {"mlx", "mlx_lm", "mlx_vlm"}
        and not f"{name}.".startswith(tuple(f"{ok}." for ok in MLX))
    ]
    assert wrong == []


def test_the_scheduler_is_pure_python() -> None:
    """No mlx, numpy, asyncio or threads where decisions are made."""
    pure = set(sys.stdlib_module_names) - {"asyncio", "threading", "multiprocessing", "concurrent"}
    wrong = [
        f"{name} imports {target}"
        for name, targets in read_imports().items()
        if any(is_within(name, f"mlxrun.{pure_package}") for pure_package in PURE)
        for target in targets
        if target.split(".")[0] not in pure | {"mlxrun"}
    ]
    assert wrong == []


def test_what_is_imported_is_what_is_declared() -> None:
    """pyproject.toml names every library that is imported, and none that is not."""
    spelled = {"PIL": "pillow", "cv2": "opencv-python", "yaml": "pyyaml"}
    known = {*sys.stdlib_module_names, "mlxrun"}
    roots = {
        target.split(".")[0]
        for name, targets in read_imports().items()
        for target in targets
        if not (name.startswith("mlxrun.evals.harnesses.") and target.split(".")[0] in HARNESSES)
    } - known
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = ("vision", "audio", "metrics", "agents")
    lines = [*project["dependencies"], *(line for name in names for line in extras[name])]
    declared = {re.split(r"[^a-z0-9-]", line)[0] for line in lines}
    assert {spelled.get(root, root.replace("_", "-")) for root in roots} == declared


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["config", "check"],
        ["config", "show"],
        ["batch", "--help"],
        ["verify", "--help"],
        ["replay", "--help"],
        ["eval", "--help"],
        ["doctor", "--help"],
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    """`mlxrun --help` and `mlxrun config check` import neither mlx nor transformers nor aiohttp."""
    code = (
        "import sys\n"
        "from mlxrun.cli.main import main\n"
        f"status = main({arguments!r})\n"
        f"heavy = sorted({LAZY!r} & {{name.partition('.')[0] for name in sys.modules}})\n"
        "sys.exit(f'imported: {heavy}' if heavy else status)\n"
    )
    done = run_program([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT.parent)})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_model_package_alone_imports_no_mlx() -> None:
    """OpenBLAS has to be in the process before mlx is, or products take 30 times as long."""
    code = "import sys, mlxrun.model; sys.exit('mlx.core' in sys.modules)"
    assert run_program([sys.executable, "-c", code], cwd=ROOT.parent).returncode == 0
