"""What every test needs: no model hub, and no config from the environment it happens to run in."""

from __future__ import annotations

import datetime
import gc
import importlib
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import pytest_timeout

from tests.helpers.child_start import platform_pretence

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

    from tests.helpers.served_model import ModelServer

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Else each of the many processes that tests start compiles all modules of transformers and mlx-lm again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The servers and caches of tests are not this user's. Workers of xdist share the folder of their parent.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _data = tempfile.TemporaryDirectory(prefix="mlxrun-tests-data-")
    os.environ["XDG_DATA_HOME"] = f"{_data.name}/data"
    os.environ["TESTS_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ["XDG_CACHE_HOME"] = f"{_data.name}/cache"
# `make test-product` runs tests as the product runs: threads, kernels and lengths of steps are the machine's.
PINNED = os.environ.get("TEST_ENVIRONMENT") != "product"
if PINNED:
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # on tiny matrices its threads only wait for each other

if PINNED and platform.machine() == "x86_64":
    # The same kernels everywhere. In those for Haswell and Zen a sum depends on the number of rows, which the
    # random weights of gemma2 amplify to 1e-4: the library then differs from itself by the prefill step.
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

# Before mlxrun is imported, and in the environment, for the processes of xdist and of tests.
if "--pretend-mac" in sys.argv:
    os.environ[platform_pretence.VARIABLE] = "1"
PRETENDS_MAC = bool(os.environ.get(platform_pretence.VARIABLE))
if PRETENDS_MAC:
    platform_pretence.pretend_mac()

importlib.import_module("mlxrun.model")  # as the product does: OpenBLAS has to be there before MLX

# The same device everywhere: what a GPU computes is compared by the load check, on each machine.
_core = importlib.import_module("mlx.core")
if _core.default_device() == _core.gpu or PRETENDS_MAC:
    folders = (platform_pretence.__file__.rpartition("/")[0], os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
_core.set_default_device(_core.cpu)

# A test that plants a bug must not get what was found without it.
importlib.import_module("mlxrun.core.cache_home").KEPT_DAYS = 0  # type: ignore[attr-defined]

# Steps of any length: how a prompt is split must not depend on how busy this machine is.
if PINNED:
    importlib.import_module("mlxrun.model.machine.device").STEP_MS = 0  # type: ignore[attr-defined]

pytest.register_assert_rewrite("tests.helpers.parser_driver")  # its asserts show both sides

from tests.helpers import storm_counts  # noqa: E402
from tests.helpers.model_fixtures import probed_once, zoo  # noqa: E402, F401
from tests.helpers.storm_counts import (  # noqa: E402, F401
    pytest_runtest_logreport,
    pytest_runtest_makereport,
)
from tests.helpers.sweep_slices import is_in_slice, read_slice  # noqa: E402

_SLICE = pytest.StashKey[tuple[int, int]]()

# These have processes and sockets in them. CI gives them a second try, and names those that needed it. What
# computes an answer has to be right at the first one.
_WITH_PROCESSES = {
    *("benchmarks", "cli", "clients", "cluster", "evals", "jobs", "robustness", "server"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep-slice", help="of the sweep only these tests: K/N, or auto/N by the day")
    parser.addoption(
        "--pretend-mac", action="store_true", help="no /proc, and a Metal device that refuses to compute"
    )
    parser.addoption("--night", type=int, default=0, help="other random numbers for the storms of robustness")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one more than there are cores, since many tests wait for processes that they start."""
    return (os.cpu_count() or 1) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("sweep_slice"):
        number, total = config.stash[_SLICE]
        terminalreporter.write_line(
            f"sweep: slice {number} of {total}; again: --sweep-slice {number}/{total}"
        )
    storm_counts.pytest_terminal_summary(terminalreporter)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected, which live to the end
    if config.pluginmanager.has_plugin("xdist"):
        config.option.loadscopereorder = False  # files are in the order of `_put_long_files_first`
    if text := config.getoption("sweep_slice"):
        try:
            config.stash[_SLICE] = read_slice(text, datetime.date.today())
        except ValueError as error:
            raise pytest.UsageError(f"--sweep-slice: {error}") from error
        config.option.sweep_slice = "{}/{}".format(
            *config.stash[_SLICE]
        )  # also of xdist's processes, at midnight


def pytest_collection_finish() -> None:
    """No later garbage collection walks over twenty thousand tests and all modules: half a second each, and
    tests and the engine ask for many."""
    gc.enable()
    gc.collect()
    gc.freeze()


def _leave_out_other_slices(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, total = config.stash[_SLICE]

    def is_left_out(item: pytest.Item) -> bool:
        return "sweep" in item.keywords and not is_in_slice(item.nodeid, number, total)

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


@cache
def _name_folders(path: Path) -> tuple[str, ...]:
    """The folders of a test file below tests/, from outside in."""
    return path.relative_to(Path(__file__).parent).parts[:-1]


@cache
def _list_marks(folders: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    """The marks of `pytestmark` in the __init__.py of these folders."""
    names = (".".join(("tests", *folders[: depth + 1])) for depth in range(len(folders)))
    marks = (getattr(sys.modules.get(name), "pytestmark", None) for name in names)
    return [mark for mark in marks if mark is not None]


def _mark_as_their_folders(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in _list_marks(_name_folders(item.path)):
            item.add_marker(mark)


def _put_long_files_first(items: list[pytest.Item]) -> None:
    """So that the processes of xdist, which take a file at a time, end together."""
    long: set[Path] = set()
    for item in items:
        if item.path not in long and {"slow", "thorough"} & item.keywords.keys():
            long.add(item.path)
    items.sort(key=lambda item: item.path not in long)


# Before pytest's own, which selects by -m.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_as_their_folders(items)
    _put_long_files_first(items)
    for item in items:
        if "sweep" in item.keywords:
            item.add_marker(pytest.mark.timeout(1400))  # else pyproject.toml's
    if config.getoption("sweep_slice"):
        _leave_out_other_slices(config, items)
    # The plugin asks a table of another process about each test that it may run again.
    count, config.option.reruns = config.getoption("reruns"), None
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:  # of a process of xdist: else the plugin waits 40 ms for each test, for an ACK
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for item in items:
        if count and _WITH_PROCESSES.intersection(_name_folders(item.path)[:1]):
            item.add_marker(pytest.mark.flaky(reruns=count))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Limit a second try too: pytest-timeout stops its clock at the first failure.

    SIGINT is taken as in a shell: a process that was started in the background ignores it, and so would the
    tests of Ctrl-C, which then wait for ever. A test before may have changed it too.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(item, "execution_count", 1) > 1:
        settings = pytest_timeout._get_item_settings(item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)


# No deadlines and no complaint of slowness: machines differ. The same examples each time; more with
# `pytest --hypothesis-profile full`, and others, as many, with `random` (tests/helpers/examples.py).
for name, same in (("mlxrun", True), ("full", True), ("random", False)):
    hypothesis.settings.register_profile(
        name, deadline=None, derandomize=same, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("mlxrun")


@pytest.fixture
def night(request: pytest.FixtureRequest) -> int:
    """Which random numbers the storms have: the same each time, unless `pytest --night N` asks for others."""
    return int(request.config.getoption("night"))


@pytest.fixture(autouse=True)
def _no_config_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLXRUN_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def served() -> Iterator[ModelServer]:
    """The embedded model behind a real server, one for all tests of a file."""
    from mlxrun.config.settings import Config
    from tests.helpers.served_model import run_model_server

    with run_model_server(Config()) as running:
        yield running


@pytest.fixture(scope="module")
def openai_client(served: ModelServer) -> Iterator[OpenAI]:
    """OpenAI's own client of that server, which tries once."""
    from openai import OpenAI

    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def anthropic_client(served: ModelServer) -> Iterator[Anthropic]:
    """Anthropic's own client of that server, which tries once."""
    from anthropic import Anthropic

    with Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Commands that run in this process set up logging; later tests must not write to a closed stream."""
    yield
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)
    logging.getLogger("mlxrun").setLevel(logging.NOTSET)
    logging.captureWarnings(False)
