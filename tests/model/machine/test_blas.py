"""OpenBLAS is loaded before MLX, and only a real one counts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mlxrun.core.errors import ConfigError
from mlxrun.model.machine import blas
from tests.helpers.command_processes import run_program


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux for the libraries of a process")
def test_openblas_is_loaded_before_mlx_and_never_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the model package loads a library and nothing else."""
    code = (
        "import sys; import mlxrun.model; from mlxrun.model.machine.blas import load_blas, find_loaded_blas\n"
        "assert 'mlx.core' not in sys.modules; before = find_loaded_blas(); import mlx.core\n"
        "assert load_blas() is None; assert find_loaded_blas() == before; print(before is not None)"
    )
    out = run_program([sys.executable, "-c", code], check=True)
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert out.stdout.strip() == str(blas.load_blas() is not None)


def test_a_copy_that_belongs_to_another_package_is_not_taken_for_openblas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = ["/lib/libc.so.6", "/venv/numpy.libs/libscipy_openblas64_-ff.so"]
    monkeypatch.setattr(blas, "loaded_path", None)
    monkeypatch.setattr(blas, "list_mapped_files", lambda: mapped)
    assert blas.find_loaded_blas() is None
    mapped.append("/usr/lib/openblas-pthread/libopenblasp-r0.3.so")
    assert blas.find_loaded_blas() == "/usr/lib/openblas-pthread/libopenblasp-r0.3.so"
    mapped.clear()  # what is loaded stays, and is not looked for again
    assert blas.find_loaded_blas() == "/usr/lib/openblas-pthread/libopenblasp-r0.3.so"


def test_blas_is_described_by_what_determines_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, path: str) -> None:
            assert path == "/usr/lib/libopenblasp-r0.3.so"

            self.openblas_get_config = Mock(return_value=b"OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH Zen")
            self.openblas_get_corename = Mock(return_value=b"Zen")
            self.openblas_get_num_threads = lambda: 8

    monkeypatch.setattr(blas, "find_loaded_blas", lambda: None)
    monkeypatch.setattr(blas, "_HELD", blas._HeldThreads())  # engines of other tests may still follow
    assert blas.describe_blas() == {"blas": None}
    monkeypatch.setattr(blas, "find_loaded_blas", lambda: "/usr/lib/libopenblasp-r0.3.so")
    monkeypatch.setattr("ctypes.CDLL", Library)
    name = {"blas": "libopenblasp-r0.3.so"}
    assert blas.describe_blas() == {
        **name,
        "blas_version": "0.3.21",
        "blas_kernel": "Zen",
        "blas_threads": 8,
    }
    monkeypatch.setattr("ctypes.CDLL", lambda path: object())
    assert blas.describe_blas() == name


class FakeBlas:
    """Counts threads like a build of OpenBLAS. `most`: threads of a serial build; `own`: what each thread of
    one with OpenMP has by itself."""

    def __init__(self, threads: int, most: int = 64, own: int = 0) -> None:
        self.threads = threads
        self.openblas_get_num_threads = lambda: self.threads
        self.openblas_get_config = Mock(return_value=b"OpenBLAS 0.3.21")
        self.openblas_get_corename = Mock(return_value=b"Zen")
        self.openblas_set_num_threads = lambda count: setattr(self, "threads", min(count, most))
        self.openblas_get_parallel = lambda: blas.OPENMP if own else 1
        self.omp_get_max_threads = lambda: own


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Sets the BLAS of this process by `load.blas = FakeBlas(...)`."""
    found = SimpleNamespace(blas=None)
    monkeypatch.setattr(blas, "find_loaded_blas", lambda: found.blas and "/usr/lib/libopenblas.so")
    monkeypatch.setattr("ctypes.CDLL", lambda path: found.blas)
    monkeypatch.setattr(blas, "_HELD", blas._HeldThreads())
    return found


def test_threads_are_held_as_long_as_an_engine_needs_them(load: SimpleNamespace) -> None:
    """Several engines hold one number; afterwards it is as before. No engine, or no BLAS, changes nothing."""
    load.blas = found = FakeBlas(8)
    with blas.hold_blas_threads(None):
        assert found.threads == 8
    with blas.hold_blas_threads(1):
        assert found.threads == 1
        with blas.hold_blas_threads(1), blas.hold_blas_threads(None):
            assert found.threads == 1
        assert found.threads == 1
    assert found.threads == 8
    load.blas = None
    with blas.hold_blas_threads(1):
        pass


def test_engines_with_other_threads_are_refused(load: SimpleNamespace) -> None:
    load.blas = found = FakeBlas(8)
    with blas.hold_blas_threads(1):
        text = r"engine\.blas_threads: another engine of this process computes with 1, .* cannot with 2"
        with pytest.raises(ConfigError, match=text), blas.hold_blas_threads(2):
            pass
        assert found.threads == 1
    with blas.hold_blas_threads(2):
        assert found.threads == 2
    assert found.threads == 8


@pytest.mark.parametrize(
    ("found", "count", "is_held"),
    [
        (FakeBlas(1, most=1), 1, True),  # a serial build
        (FakeBlas(1, most=1), 2, False),
        (FakeBlas(2, own=2), 1, True),  # OpenMP: with one thread, no other thread is asked
        (FakeBlas(2, own=2), 2, True),
        (FakeBlas(2, own=2), 4, False),
    ],
)
def test_a_number_that_a_build_cannot_have_is_refused(
    load: SimpleNamespace, found: FakeBlas, count: int, is_held: bool
) -> None:
    load.blas, before = found, found.threads
    if is_held:
        with blas.hold_blas_threads(count):
            assert found.threads == count
    else:
        with (
            pytest.raises(ConfigError, match=rf"and not with {count}; set it to"),
            blas.hold_blas_threads(count),
        ):
            pass
    assert found.threads == before


class FakeCores:
    """Says how many cores are free; None: it is too soon to say."""

    def __init__(self) -> None:
        self.free: int | None = None

    def count(self) -> int | None:
        return self.free


@pytest.fixture
def cores(load: SimpleNamespace) -> FakeCores:
    blas._HELD.cores = found = FakeCores()  # type: ignore[assignment]
    return found


def test_threads_follow_the_free_cores(load: SimpleNamespace, cores: FakeCores) -> None:
    load.blas = found = FakeBlas(8)
    with blas.follow_free_cores() as follow:
        for free, threads in ((None, 8), (3, 3), (None, 3), (1, 1), (5, 5), (16, 8), (2, 2)):
            cores.free = free
            follow()
            assert found.threads == threads
            assert blas.describe_blas()["blas_threads"] == 8  # what runs record
    assert found.threads == 8


def test_a_number_that_an_engine_holds_stays(load: SimpleNamespace, cores: FakeCores) -> None:
    """Whichever came first; afterwards OpenBLAS has its own number, not what was followed."""
    load.blas, cores.free = (found := FakeBlas(8)), 3
    with blas.follow_free_cores() as follow:
        follow()
        with blas.hold_blas_threads(2):
            follow()
            assert found.threads == blas.describe_blas()["blas_threads"] == 2
        assert found.threads == 8
        follow()
        assert found.threads == 3
    with blas.hold_blas_threads(2), blas.follow_free_cores() as follow:
        follow()
        assert found.threads == 2
    assert found.threads == 8


def test_two_engines_follow_the_same_cores(load: SimpleNamespace, cores: FakeCores) -> None:
    load.blas, cores.free = (found := FakeBlas(8)), 3
    with blas.follow_free_cores() as first:
        with blas.follow_free_cores() as second:
            first()
            second()
        assert found.threads == 3
        cores.free = 8
        first()
        assert found.threads == 8
        cores.free = 1
        first()
    assert found.threads == 8


def test_nothing_follows_where_threads_have_numbers_of_their_own(
    load: SimpleNamespace, cores: FakeCores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP, no OpenBLAS, or a system that does not say what others use."""
    cores.free = 1
    load.blas = found = FakeBlas(8, own=8)
    with blas.follow_free_cores() as follow:
        follow()
        assert found.threads == 8
    load.blas = None
    with blas.follow_free_cores() as follow:
        follow()
    load.blas, blas._HELD.cores = (found := FakeBlas(8)), None
    monkeypatch.setattr(blas, "FreeCores", Mock(side_effect=AttributeError))
    with blas.follow_free_cores() as follow:
        follow()
        assert found.threads == 8


def test_the_real_library_takes_the_number() -> None:
    if blas.find_loaded_blas() is None:
        pytest.skip("there is no OpenBLAS here")
    before = blas.describe_blas()["blas_threads"]
    with blas.hold_blas_threads(before + 1):
        assert blas.describe_blas()["blas_threads"] == before + 1
    assert blas.describe_blas()["blas_threads"] == before
