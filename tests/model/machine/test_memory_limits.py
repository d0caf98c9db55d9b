"""The limits of this process, of its control groups and of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.machine import memory_limits
from mlxrun.model.machine.memory_limits import MemoryLimit, explain_shortage, find_free_memory, list_limits

AS = MemoryLimit("ulimit -v", 1000, 600, reserves=True)
GROUP = MemoryLimit("the memory limit of a group", 2000, 500)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where control groups are, with a process that `cgroup` says the group of."""
    monkeypatch.setattr(memory_limits, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory_limits, "list_machine_limits", list)
    (tmp_path / "proc").mkdir()
    return tmp_path / "groups"


def write_group(folder: Path, **values: object) -> None:
    """Files of a control group, `__` for dots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_groups_of_version_2_count_with_those_above(groups: Path) -> None:
    """Files that the group has in memory would go first."""
    (groups.parent / "proc" / "cgroup").write_text("0::/outer/inner\n")
    stat = "anon 1\ninactive_file 40\nactive_file 5"
    write_group(groups / "outer/inner", memory__max="max", memory__current=90, memory__stat=stat)
    write_group(groups / "outer", memory__max=1000, memory__current=100, memory__stat=stat)
    name = f"the memory limit of the control group {groups / 'outer'}"
    assert list_limits() == [MemoryLimit(name, 1000, 940)]


def test_groups_of_version_1(groups: Path) -> None:
    (groups.parent / "proc" / "cgroup").write_text("5:cpu:/a\n4:memory:/job\n0::/\n")
    unlimited, stat = (1 << 63) - 4096, "total_inactive_file 7"
    names = ("memory__limit_in_bytes", "memory__usage_in_bytes", "memory__stat")
    write_group(groups / "memory/job", **dict(zip(names, (500, 107, stat), strict=True)))
    write_group(groups / "memory", **dict(zip(names, (unlimited, 900, stat), strict=True)))
    assert [(limit.total, limit.left) for limit in list_limits()] == [(500, 400)]
    (groups.parent / "proc" / "cgroup").write_text("4:memory:/docker/of-the-host\n")
    write_group(groups / "memory", memory__limit_in_bytes=800)
    assert [limit.total for limit in list_limits()] == [800], "a container sees its own group as the root"


def test_another_system_has_no_limits(groups: Path) -> None:
    assert list_limits() == []
    assert find_free_memory([], 100) == 0


def test_reserved_space_counts_where_address_space_does() -> None:
    assert find_free_memory([AS, GROUP], reserved=200) == 400
    assert find_free_memory([AS, GROUP], reserved=50) == 500
    assert find_free_memory([AS], reserved=900) == 1, "0 would mean that nothing is known"


def test_a_shortage_names_what_limits() -> None:
    assert explain_shortage(400, [AS, GROUP], reserved=200) is None
    said = explain_shortage(450, [AS, GROUP], reserved=200)
    assert said == " + threads and BLAS 200 B = 650 B, but ulimit -v leaves 600 B of 1.0 kB"
    said = explain_shortage(550, [AS, GROUP], reserved=0)
    assert said == " = 550 B, but the memory limit of a group leaves 500 B of 2.0 kB"


def test_too_little_for_the_libraries_is_known_before_they_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_limits, "list_process_limits", lambda: [AS])
    monkeypatch.delitem(sys.modules, "mlx.core")
    with pytest.raises(ModelLoadError, match="ulimit -v leaves 600 B of 1.0 kB, and the libraries"):
        memory_limits.prepare_imports()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ulimit -v has an effect on Linux only")
@pytest.mark.parametrize(("kind", "name"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")])
def test_what_the_process_may_take_is_what_it_can(kind: str, name: str) -> None:
    """A mapping a bit smaller than what is left succeeds, and one a bit larger fails."""
    program = f"""
import mmap, resource
from mlxrun.model.machine.memory_limits import list_limits
resource.setrlimit(resource.{kind}, (1 << 30, 1 << 30))
limit = list_limits()[0]
assert (limit.name, limit.total, limit.reserves) == ({name!r}, 1 << 30, True), limit
mmap.mmap(-1, limit.left - (1 << 22), flags=mmap.MAP_PRIVATE).close()
try:
    mmap.mmap(-1, limit.left + (1 << 22), flags=mmap.MAP_PRIVATE)
except OSError:
    print("as expected")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == "as expected\n", done.stderr


VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               50000.
Pages active:                            300000.
Pages inactive:                          250000.
Pages purgeable:                           1000.
"Translation faults":                 999999999.
File-backed pages:                       120000.
"""


def test_a_mac_says_what_it_can_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `vm_stat`: there is no /proc. Inactive pages of programs would have to be compressed or swapped."""
    program = tmp_path / "vm_stat"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{VM_STAT}E\n")
    program.chmod(0o755)
    monkeypatch.setattr(memory_limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_limits, "_VM_STAT", (str(program),))
    monkeypatch.setattr(memory_limits.sys, "platform", "darwin")
    (limit,) = memory_limits.list_machine_limits()
    assert (limit.name, limit.left) == (memory_limits.MACHINE, 171_000 * 16384) and limit.total > 0


@pytest.mark.parametrize("output", ["", VM_STAT.replace("page size", "pages"), VM_STAT.replace("free", "f")])
def test_what_vm_stat_does_not_say_is_unknown(output: str) -> None:
    assert memory_limits.count_available(output) is None


def test_without_vm_stat_no_limit_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_limits, "_VM_STAT", (str(tmp_path / "vm_stat"),))
    for system in ("darwin", "freebsd"):
        monkeypatch.setattr(memory_limits.sys, "platform", system)
        assert memory_limits.list_machine_limits() == []
