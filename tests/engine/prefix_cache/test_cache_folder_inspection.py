"""What `mlxrun cache` reads from a folder: entries by their headers, damage by their content."""

from __future__ import annotations

import os
from pathlib import Path

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.cache_folder import delete_files, inspect_models, verify_files
from tests.helpers.cache_files import OTHER, ROOT, write_entry


def test_entries_are_listed_by_model_and_by_last_use(tmp_path: Path) -> None:
    for number, used in ((1, 3000), (2, 1000), (3, 2000)):
        os.utime(write_entry(tmp_path, number)[2], (used, used))
    write_entry(tmp_path, 9, root=OTHER, kind=SnapshotKind.STATE)
    first, second = inspect_models(tmp_path)
    assert [first.folder.fingerprint, second.folder.fingerprint] == [ROOT, OTHER]
    assert [found.used for found in first.entries] == [1000, 2000, 3000]
    assert (first.tokens, second.tokens) == (12, 4)
    assert first.nbytes == sum(found.nbytes for found in first.entries)


def test_a_file_whose_header_cannot_be_read_is_counted(tmp_path: Path) -> None:
    write_entry(tmp_path, 1)
    path = write_entry(tmp_path, 2)[2]
    path.write_bytes(path.read_bytes()[:5])
    (found,) = inspect_models(tmp_path)
    assert (len(found.entries), found.unreadable) == (1, 1)
    assert found.nbytes == found.entries[0].nbytes + 5


def test_a_flipped_byte_is_found_and_deleted_on_request(tmp_path: Path) -> None:
    good, bad = write_entry(tmp_path, 1)[2], write_entry(tmp_path, 2)[2]
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    count, found = verify_files(tmp_path, delete=False)
    assert (count, [path for path, _ in found], bad.exists()) == (1, [bad], True)
    _, found = verify_files(tmp_path, delete=True)
    assert found[0][1].endswith("; deleted") and not bad.exists() and good.exists()


def test_deleting_says_what_is_gone_and_what_could_not_go(tmp_path: Path) -> None:
    path = write_entry(tmp_path, 1)[2]
    size = path.stat().st_size
    folder = tmp_path / "folder"
    folder.mkdir()
    deleted, freed, failed = delete_files([(path, size), (tmp_path / "gone", 7), (folder, 9)])
    assert (deleted, freed) == (1, size) and not path.exists()
    assert len(failed) == 1 and failed[0].startswith(f"{folder}: ")
