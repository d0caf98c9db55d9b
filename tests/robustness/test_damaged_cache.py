"""Damaged, forged, swapped and foreign files of the prefix cache are misses, and never change an answer.

An engine fills a folder. For each kind of damage a copy of that folder is damaged, and a new engine answers
from it: the tokens and logprobs are those of the oracle, there is no error, and the damaged files are gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.request import Request, TokenEvent
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.plain_user import obey_permissions

pytestmark = pytest.mark.usefixtures("probed_once")

CHUNK = 16
COUNT = 6
BOUNDARY = 21
BASE = tuple(text_models.prompts(41, [75])[0])
OTHER = tuple(text_models.prompts(42, [75])[0])
PROMPTS = (BASE, (*BASE[:40], *OTHER[:30]), (*BASE[:BOUNDARY], *OTHER[30:60]))
STRANGER = tuple(text_models.prompts(43, [60])[0])
CI = ("llama", "qwen3_next", "gemma3_text")
FAMILIES = [pytest.param(f, marks=[] if f in CI[:2] else [pytest.mark.sweep]) for f in text_models.TEXT]
ONE = [pytest.param(f, marks=[] if f == "qwen3_next" else [pytest.mark.sweep]) for f in CI]

DIGEST = slice(35, 99)  # of the file, in it: after the length and {"__metadata__":{"digest":"

Damage = Callable[[list[Path]], None]


@dataclass(frozen=True)
class Filled:
    """What an engine left behind, and how to begin anew from copies of it."""

    zoo: Zoo
    family: str
    disk: Path
    scratch: Path
    seed: int | None = None

    def copy(self) -> Path:
        """The same files in a new place, so that each damage begins with whole ones."""
        place = self.scratch / f"copy-{len(list(self.scratch.iterdir()))}"
        shutil.copytree(self.disk, place)
        return place

    def answer(self, disk: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> Answered:
        """Answer the prompts from what is in `disk`, each as if it ran cold and alone."""
        engine = open_engine(self.zoo, self.family, disk)
        events = []
        for number, ids in enumerate(prompts):
            event = engine_driver.run_requests(engine, [ask(f"{number}", ids)])[f"{number}"]
            engine_driver.check_answer(event, self.zoo.answer(self.family, ids, COUNT))
            events.append(event)
        engine.prefix_cache.shutdown()
        return Answered(events, engine.prefix_cache.read_counters())


@dataclass(frozen=True)
class Answered:
    events: list[TokenEvent]
    counts: Mapping[str, int]

    @property
    def cached(self) -> list[int]:
        return [event.num_cached_tokens for event in self.events]


def open_engine(zoo: Zoo, family: str, disk: Path, seed: int | None = None) -> Any:
    options = {"backend": "disk", "disk_path": str(disk), "checkpoint_every": CHUNK}
    return engine_driver.make_real_engine(zoo.text(family, seed), **options)


def ask(name: str, ids: Sequence[int]) -> Request:
    return replace(engine_driver.make_text_request(name, ids, max_tokens=COUNT), cache_positions=(BOUNDARY,))


def fill(zoo: Zoo, family: str, disk: Path, seed: int | None = None) -> Path:
    """Have an engine keep what the prompts need."""
    engine = open_engine(zoo, family, disk, seed)
    for number, ids in enumerate(PROMPTS):
        engine_driver.run_requests(engine, [ask(f"{number}", ids)])
    engine.prefix_cache.shutdown()
    assert files(disk)
    return disk


def files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.safetensors"))


FILLED: dict[str, Path] = {}


@pytest.fixture
def filled(zoo: Zoo, family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """The family's folder, filled once in a session."""
    if family not in FILLED:
        FILLED[family] = fill(zoo, family, tmp_path_factory.mktemp(f"filled-{family}"))
    return Filled(zoo, family, FILLED[family], tmp_path)


# -- a file, taken apart ----------------------------------------------------------------------------


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: dict[str, Any], data: bytes, *, signed: bool) -> bytes:
    """The file again; `signed`: with a digest that fits, as a forger would write it."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text + data
    if not signed:
        return whole
    blank = whole[: DIGEST.start] + b"0" * 64 + whole[DIGEST.stop :]
    digest = hashlib.blake2b(blank, digest_size=32).hexdigest().encode()
    return whole[: DIGEST.start] + digest + whole[DIGEST.stop :]


def test_files_are_taken_apart_as_they_are_made(zoo: Zoo, tmp_path: Path) -> None:
    """The forger of these tests writes what the cache would."""
    for path in files(fill(zoo, "llama", tmp_path / "d")):
        assert joined(*parts(path.read_bytes()), signed=True) == path.read_bytes()


def forge(change: Callable[[dict[str, Any]], None], *, signed: bool) -> Damage:
    """Change the header of every file."""

    def damage(paths: list[Path]) -> None:
        for path in paths:
            header, data = parts(path.read_bytes())
            change(header)
            path.write_bytes(joined(header, data, signed=signed))

    return damage


# -- header fields ----------------------------------------------------------------------------------


def flip_hex(text: str) -> str:
    return ("1" if text[0] == "0" else "0") + text[1:]


def more(by: int) -> Callable[[str], str]:
    return lambda text: str(int(text) + by)


def other_part(text: str) -> str:
    return "state" if text == "delta" else "delta"


FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "digest": ("digest", flip_hex),
    "format": ("format", more(1)),
    "root": ("root", flip_hex),
    "key": ("key", flip_hex),
    "key of capitals": ("key", lambda text: text.upper() + "A"),
    "parent": ("parent", flip_hex),
    "part": ("part", other_part),
    "part of nothing": ("part", lambda text: "whole"),
    "start later": ("start", more(CHUNK)),
    "start earlier": ("start", more(-1)),
    "start no number": ("start", lambda text: "a"),
    "start with a sign": ("start", lambda text: f"+{text}"),
    "stop": ("stop", more(1)),
    "stop a chunk on": ("stop", more(CHUNK)),
    "boundary of neither": ("boundary", lambda text: "maybe"),
    "tokens": ("tokens", flip_hex),
    "codec.part": ("codec.part", other_part),
    "codec.layout": ("codec.layout", flip_hex),
    "codec.tokens": ("codec.tokens", more(1)),
    "codec.tokens fewer": ("codec.tokens", more(-1)),
    "a number for a text": ("start", int),
}


def set_field(name: str) -> Callable[[dict[str, Any]], None]:
    field, change = FIELDS[name]

    def act(header: dict[str, Any]) -> None:
        facts = header["__metadata__"]
        facts[field] = change(facts[field])

    return act


def last_tensor(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header[list(header)[-1]]
    return entry


def swap_axes(header: dict[str, Any]) -> None:
    entry = last_tensor(header)
    entry["shape"] = [entry["shape"][1], entry["shape"][0], *entry["shape"][2:]]
    if entry["shape"][0] == entry["shape"][1]:
        entry["shape"] = entry["shape"][::-1]


def rename(header: dict[str, Any]) -> None:
    name = list(header)[-1]
    header[name + "x"] = header.pop(name)


TABLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "dtype of the same size": lambda header: last_tensor(header).update(dtype="I32"),
    "dtype of another size": lambda header: last_tensor(header).update(dtype="F16"),
    "dtype unknown": lambda header: last_tensor(header).update(dtype="Q7"),
    "dtype no text": lambda header: last_tensor(header).update(dtype=["F32"]),
    "shape": swap_axes,
    "shape negative": lambda header: last_tensor(header)["shape"].append(-1),
    "offsets": lambda header: last_tensor(header).update(data_offsets=[0, 8]),
    "name": rename,
    "no tensors": lambda header: [header.pop(name) for name in list(header)[2:]] and None,
    "no ids": lambda header: header.pop("ids") and None,
    "entry of nothing": lambda header: header.update({list(header)[-1]: None}),
    "a fact less": lambda header: header["__metadata__"].pop("tokens") and None,
    "a fact more": lambda header: header["__metadata__"].update(more="x"),
    "codec.more": lambda header: header["__metadata__"].update({"codec.more": "x"}),
}
CHANGES = {name: set_field(name) for name in FIELDS} | TABLE
# With a digest computed again these are as good as before: the first is right then, the second is not read.
HARMLESS = {"digest", "codec.more"}


def check_missed(filled: Filled, damage: Damage) -> Path:
    """Files are damaged, that of the first chunk too: nothing is found, and no damaged file is left."""
    disk = filled.copy()
    paths = files(disk)
    damage(paths)
    old = {path: path.read_bytes() for path in files(filled.disk)}
    bad = {path: path.read_bytes() for path in paths}
    bad = {path: data for path, data in bad.items() if data not in old.values()}
    assert bad
    chained = any(is_delta(data) for data in old.values())
    done = filled.answer(disk)
    assert done.cached[0] == 0, "not a miss"
    assert done.counts["refused"] > 0
    left = [path.name for path, data in bad.items() if path.exists() and path.read_bytes() == data]
    # States alone do not rest on the first chunk: those that nobody asked for are not known to be damaged.
    assert not left or not chained, "damaged files stay"
    return disk


def is_delta(data: bytes) -> bool:
    return bool(parts(data)[0]["__metadata__"]["part"] == "delta")


def check_mended(filled: Filled, disk: Path) -> None:
    """What was computed instead serves later engines. Not always the next one: a damaged file that was first
    read late took with it what had been computed on top of it."""
    filled.answer(disk)
    again = filled.answer(disk)
    assert again.counts["refused"] == 0
    assert again.cached[0] == len(PROMPTS[0]) - 1


def each_another(names: Sequence[str]) -> Damage:
    """Each file gets another of these changes, with its old digest."""

    def damage(paths: list[Path]) -> None:
        for number, path in enumerate(paths):
            forge(CHANGES[names[number % len(names)]], signed=False)([path])

    return damage


@pytest.mark.parametrize("family", FAMILIES)
def test_every_header_field_changed(filled: Filled) -> None:
    """Every field of the header, as damage would change it; the digest is as it was."""
    names = list(CHANGES)
    for _ in range(0, len(names), len(files(filled.disk))):
        disk = check_missed(filled, each_another(names))
        names = names[len(files(disk)) :] + names[: len(files(disk))]
    check_mended(filled, disk)


@pytest.mark.parametrize("family", ONE)
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in HARMLESS])
def test_every_header_field_forged(filled: Filled, name: str) -> None:
    """Every field of the header of every file, and a digest that fits."""
    check_missed(filled, forge(CHANGES[name], signed=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_boundary_that_is_none_changes_no_answer(filled: Filled) -> None:
    """It only says what is evicted first."""

    def turned(header: dict[str, Any]) -> None:
        facts = header["__metadata__"]
        facts["boundary"] = {"yes": "no", "no": "yes"}[facts["boundary"]]

    disk = filled.copy()
    forge(turned, signed=True)(files(disk))
    assert filled.answer(disk).cached[0] == len(PROMPTS[0]) - 1
    check_missed(filled, forge(turned, signed=False))


# -- bytes ------------------------------------------------------------------------------------------


def flip(rng: random.Random, where: str) -> Damage:
    """A bit of one byte of every file: of its length, of its header, or of its data."""

    def damage(paths: list[Path]) -> None:
        for path in paths:
            data = bytearray(path.read_bytes())
            head = 8 + int.from_bytes(data[:8], "little")
            first, stop = {"length": (0, 8), "header": (8, head), "data": (head, len(data))}[where]
            data[rng.randrange(first, stop)] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(data))

    return damage


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", ["length", "header", "data"])
def test_flipped_bits(filled: Filled, where: str) -> None:
    """In every file at once."""
    check_mended(filled, check_missed(filled, flip(random.Random(), where)))


@pytest.mark.sweep
@pytest.mark.parametrize("family", CI)
@pytest.mark.parametrize("where", ["length", "header", "data"])
def test_many_flipped_bits(filled: Filled, where: str) -> None:
    rng = random.Random()
    for _ in range(20):
        check_missed(filled, flip(rng, where))


@pytest.mark.parametrize("family", ONE)
def test_one_bad_file_of_many(filled: Filled) -> None:
    """What does not rest on it is still used; each file once."""
    rng, every = random.Random(), files(filled.disk)
    for number in range(len(every)):
        disk = filled.copy()
        flip(rng, rng.choice(["header", "data"]))([files(disk)[number]])
        assert filled.answer(disk).counts["refused"] <= len(every)


def cut(share: float) -> Damage:
    def damage(paths: list[Path]) -> None:
        for path in paths:
            os.truncate(path, int(path.stat().st_size * share))

    return damage


def longer(paths: list[Path]) -> None:
    for path in paths:
        path.write_bytes(path.read_bytes() + b"\0")


TORN: dict[str, Damage] = {
    "empty": cut(0),
    "the length": cut(0.0005),
    "the header": cut(0.05),
    "half": cut(0.5),
    "the last bytes": cut(0.999),
    "longer": longer,
}


@pytest.mark.parametrize("family", ONE)
@pytest.mark.parametrize("how", list(TORN))
def test_torn_files(filled: Filled, how: str) -> None:
    """As a power cut leaves them."""
    check_missed(filled, TORN[how])


# -- files that are not what their name says --------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_files_that_swapped_names(filled: Filled) -> None:
    """Each holds another record than its name says."""
    disk = filled.copy()
    paths = files(disk)
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(data)
    done = filled.answer(disk)
    assert done.cached[0] == 0
    assert done.counts["refused"] == len(paths)


@pytest.mark.parametrize("family", CI)
def test_files_of_another_model(filled: Filled, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other weights, same shapes: in a folder of their own, and refused if they are put in ours."""
    disk = filled.copy()
    theirs = files(fill(zoo, filled.family, tmp_path_factory.mktemp("theirs"), seed=7))
    assert {path.name for path in theirs}.isdisjoint(path.name for path in files(disk))
    (home,) = {path.parent for path in files(disk)}
    for path in files(disk):
        path.unlink()
    for path in theirs:
        shutil.copy(path, home / path.name)
    shutil.copytree(theirs[0].parent, disk / theirs[0].parent.name)
    done = filled.answer(disk)
    assert done.cached[0] == 0
    assert done.counts["refused"] == len(theirs)
    assert not any((home / path.name).exists() for path in theirs)
    left = {path.name: path.read_bytes() for path in (disk / theirs[0].parent.name).iterdir()}
    assert left == {path.name: path.read_bytes() for path in theirs}, "another model's own folder is touched"


@pytest.mark.parametrize("family", CI)
def test_names_that_are_no_record_files(filled: Filled) -> None:
    """A folder, a link and a stranger's file stay as they are, and a folder is in nobody's way."""
    disk = filled.copy()
    paths = files(disk)
    for path in paths[1:]:
        path.unlink()
        path.mkdir()
        (path / "own").write_text("kept")
    paths[0].rename(disk / "elsewhere")
    paths[0].symlink_to(disk / "elsewhere")
    notes = paths[0].with_name("notes.safetensors")
    notes.write_text("not ours")
    filled.answer(disk)
    assert all((path / "own").read_text() == "kept" for path in paths[1:])
    assert notes.read_text() == "not ours"
    assert (disk / "elsewhere").exists()


@pytest.mark.parametrize("family", CI)
def test_files_that_may_not_be_read(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss; whose they are is not known, so they stay until their names are needed."""

    def denied(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    disk = filled.copy()
    paths = files(disk)
    with monkeypatch.context() as patch:
        patch.setattr("mlxrun.engine.prefix_cache.disk_tier.peek_entry", denied)
        done = filled.answer(disk, [STRANGER])
    assert done.counts["refused"] == 0
    assert all(path.exists() for path in paths)
    with monkeypatch.context() as patch:
        patch.setattr("mlxrun.engine.prefix_cache.disk_tier.load_entry", denied)
        assert filled.answer(disk).cached[0] == 0
    check_mended(filled, disk)


@pytest.mark.parametrize("family", ONE)
def test_files_without_permissions(filled: Filled) -> None:
    disk = filled.copy()
    for path in files(disk):
        path.chmod(0)
    with obey_permissions():
        assert filled.answer(disk).cached[0] == 0


# -- the tests can fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", CI)
def test_a_digest_that_is_not_compared_is_noticed(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest that fits everything, damaged payloads come through to the answers."""
    monkeypatch.setattr("mlxrun.engine.prefix_cache.entry_file._DIGEST", slice(0, 0))
    monkeypatch.setattr("mlxrun.engine.prefix_cache.entry_file.hash_file", lambda head, data: b"")

    def spoil(paths: list[Path]) -> None:
        for path in paths:
            header, data = parts(path.read_bytes())
            ids = header["ids"]["data_offsets"][1]
            path.write_bytes(joined(header, data[:ids] + bytes(len(data) - ids), signed=False))

    disk = filled.copy()
    spoil(files(disk))
    with pytest.raises(AssertionError):
        filled.answer(disk)
