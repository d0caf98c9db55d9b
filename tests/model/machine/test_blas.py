"""OpenBLAS is loaded before MLX, and only a real one counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlxrun.model.machine import blas


def test_openblas_is_loaded_before_mlx_and_never_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the model package loads a library and nothing else."""
    code = (
        "import sys; import mlxrun.model; from mlxrun.model.machine.blas import load_blas, find_loaded_blas\n"
        "assert 'mlx.core' not in sys.modules; before = find_loaded_blas(); import mlx.core\n"
        "assert load_blas() is None; assert find_loaded_blas() == before; print(before is not None)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert out.stdout.strip() == str(blas.load_blas() is not None)


def test_a_copy_that_belongs_to_another_package_is_not_taken_for_openblas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "7f0000-7f1000 r-xp 00000000 08:01 12   {}\n"
    maps = tmp_path / "maps"
    monkeypatch.setattr(blas, "Path", lambda _: maps)
    maps.write_text(row.format("/venv/numpy.libs/libscipy_openblas64_-ff.so") + row.format("/lib/libc.so.6"))
    assert blas.find_loaded_blas() is None
    maps.write_text(row.format("/usr/lib/openblas-pthread/libopenblasp-r0.3.so"))
    assert blas.find_loaded_blas() == "/usr/lib/openblas-pthread/libopenblasp-r0.3.so"


def test_blas_is_described_by_what_determines_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, path: str) -> None:
            assert path == "/usr/lib/libopenblasp-r0.3.so"

            self.openblas_get_corename = lambda: b"Zen"
            self.openblas_get_num_threads = lambda: 8

    monkeypatch.setattr(blas, "find_loaded_blas", lambda: None)
    assert blas.describe_blas() == {"blas": None}
    monkeypatch.setattr(blas, "find_loaded_blas", lambda: "/usr/lib/libopenblasp-r0.3.so")
    monkeypatch.setattr("ctypes.CDLL", Library)
    name = {"blas": "libopenblasp-r0.3.so"}
    assert blas.describe_blas() == {**name, "blas_kernel": "Zen", "blas_threads": 8}
    monkeypatch.setattr("ctypes.CDLL", lambda path: object())
    assert blas.describe_blas() == name
