"""Computes the digests that identify a model's files in a manifest, when they are first needed. Reading a
large model takes seconds."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.gguf.header import GgufHeader
from mlxrun.model.load.load_progress import LoadProgress
from mlxrun.model.load.model_facts import GENERATION
from mlxrun.model.load.model_files import find_draft_folder, list_weight_files, read_json

_FULL_HASH_BYTES = 1 << 30  # files up to this size are hashed in full
_BLOCK = 1 << 16
_SAMPLES = 1024
# What transformers reads too, unless the config of the tokenizer has the key.
_TOKENS, _TOKENS_KEY = ("added_tokens.json", "special_tokens_map.json"), "added_tokens_decoder"
# What else a tokenizer is made of where there is no tokenizer.json.
_MADE_OF = ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", *_TOKENS)
_PART, _MOST_READERS = 1 << 26, 16  # bytes that a thread hashes at a time, and threads


class LateDigests(Mapping[str, str]):
    """Digests by name. Files are read when a digest is first needed. `sources`: for each name, a function
    that returns its digest and perhaps others."""

    def __init__(self, sources: Mapping[str, Callable[[], Mapping[str, str]]]) -> None:
        self._sources = dict(sources)

    def begin(self, name: str) -> None:
        """Read the files of a digest on a thread. Whoever asks for the digest waits for that, and gets its
        error."""
        source, found = self._sources[name], Future[Mapping[str, str]]()

        def read() -> None:
            try:
                found.set_result(source())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=read, daemon=True, name="digests").start()
        self._sources |= {key: found.result for key, each in self._sources.items() if each is source}

    def add_template(self, template: str | None) -> None:
        """Add the digest of the chat template."""
        digest = hashlib.sha256((template or "").encode()).hexdigest()
        self._sources["template"] = lambda: {"template": digest}

    def __getitem__(self, name: str) -> str:
        return self._sources[name]()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def make_digests(
    settings: ModelSettings, folder: Path, gguf: GgufHeader | None, weights: bool
) -> LateDigests:
    """The digests of the model without its template, and `draft`, of the files of its draft model, which may
    influence answers. ConfigError if there is no such draft model."""

    digest_model = functools.cache(partial(digest_own_files, settings, folder, gguf))
    own = dict.fromkeys(("model", "tokenizer"), digest_model)
    if settings.draft is None:
        return LateDigests(own)
    draft = find_draft_folder(settings, weights)

    @functools.cache
    def digest_draft() -> dict[str, str]:
        return {"draft": compute_digests(draft, None)["model"]}

    return LateDigests(own | {"draft": digest_draft})


def digest_own_files(settings: ModelSettings, folder: Path, gguf: GgufHeader | None) -> dict[str, str]:
    """The digests `model` and `tokenizer` of a model's files as they are now."""
    adapter = Path(settings.adapter) if settings.adapter else None
    found = compute_digests(folder, adapter, code=settings.trust_remote_code)
    return found if gguf is None else found | {"tokenizer": gguf.digest_tokenizer()}


def compute_digests(folder: Path, adapter: Path | None, *, code: bool = False) -> dict[str, str]:
    """sha256 (hex) of `model` (config, weights, LoRA adapter) and `tokenizer`. `code`: Python files of the
    folder may run, and are part of the model."""
    weights = _list_own_files(folder, adapter, code)
    total = sum(path.stat().st_size for path in weights if path.is_file())
    progress = LoadProgress(f"reading the files of {folder.name} for their digests", total)
    return {
        "model": _hash_files(weights, progress),
        "tokenizer": _hash_files(_list_tokenizer_files(folder), progress),
    }


def list_model_files(settings: ModelSettings, folder: Path) -> list[Path]:
    """The files that the digests of a model are about, without those of its draft model."""
    adapter = Path(settings.adapter) if settings.adapter else None
    every = _list_own_files(folder, adapter, settings.trust_remote_code) + _list_tokenizer_files(folder)
    return [path for path in every if path.is_file()]


def _list_own_files(folder: Path, adapter: Path | None, code: bool) -> list[Path]:
    found = [folder / "config.json", *list_weight_files(folder)]
    found += sorted(adapter.glob("*")) if adapter else []
    found += sorted(folder.rglob("*.py")) if code else []
    found += sorted(folder.glob("*sentence*.json"))  # of sentence-transformers: prompts, the activation
    if (folder / "modules.json").is_file():  # and pooling, further layers
        found += [folder / "modules.json"]
        found += sorted(folder.glob("*/config.json")) + sorted(folder.glob("*/*.safetensors"))
    with suppress(ModelLoadError):  # of a damaged file, which does not load
        if read_json(found[0]).get("model_type") == "whisper":  # which heads give the times of words
            found.append(folder / GENERATION)
    return found


def _list_tokenizer_files(folder: Path) -> list[Path]:
    found = [folder / n for n in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")]
    names: Sequence[str] = _MADE_OF
    if found[0].is_file():
        with suppress(ModelLoadError):  # of a damaged file, which does not load
            names = () if _TOKENS_KEY in read_json(found[1]) else _TOKENS
    others = (folder / name for name in names)
    return [*found, folder / "tiktoken.model", *sorted(folder.glob("*.tiktoken")), *others]


def stamp_files(settings: ModelSettings, folder: Path) -> dict[Path, tuple[int, int, int]]:
    """The size and times of each file that the digests of a model are about. A file with others may have
    changed."""
    return {path: _stamp_file(path) for path in list_model_files(settings, folder)}


def _stamp_file(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def digest_large_files(paths: Iterable[Path]) -> str:
    """sha256 (hex) over every byte of those files of which the other digests read blocks only. Threads read
    and hash parts of them, which are in memory afterwards. A process reads files once that stay as they are.
    Empty if there are no such files; OSError if one cannot be read."""
    large = [path for path in paths if path.stat().st_size > _FULL_HASH_BYTES]
    return _digest_whole_files(tuple((path, *_stamp_file(path)) for path in large)) if large else ""


@functools.lru_cache(maxsize=4)
def _digest_whole_files(files: tuple[tuple[Path, int, int, int], ...]) -> str:
    """The digest of files with these stamps."""
    total = hashlib.sha256()
    progress = LoadProgress("reading the weights for their digests", sum(size for _, size, *_ in files))
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_READERS)) as readers:
        for path, size, *_ in files:
            total.update(f"{path.name}:{size}:".encode())
            for part in readers.map(partial(_hash_part, path), range(0, size, _PART)):
                total.update(part)
                progress.add(_PART)
    progress.end()
    return total.hexdigest()


def _hash_part(path: Path, start: int) -> bytes:
    found, left = hashlib.sha256(), _PART
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (block := file.read(min(left, 1 << 20))):
            found.update(block)
            left -= len(block)
    return found.digest()


def digest_adapter(folder: Path) -> str:
    """sha256 (hex) of the files of a LoRA adapter."""
    return _hash_files(sorted(folder.glob("*")), LoadProgress(f"reading {folder.name} for its digest", 0))


def _hash_files(paths: list[Path], progress: LoadProgress) -> str:
    total = hashlib.sha256()
    for path in paths:
        if path.is_file():
            total.update(f"{path.name}:{path.stat().st_size}:".encode())
            try:
                _hash_file(total, path, progress)
            except OSError as error:
                raise ModelLoadError(f"{path}: it cannot be read: {error.strerror}") from error
    return total.hexdigest()


def _hash_file(total: hashlib._Hash, path: Path, progress: LoadProgress) -> None:
    """Hash the file, or evenly spaced blocks of it if all of it would take seconds."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _FULL_HASH_BYTES:
            while block := file.read(1 << 20):
                total.update(block)
                progress.add(len(block))
            return
        for i in range(_SAMPLES):
            file.seek(i * (size - _BLOCK) // (_SAMPLES - 1))
            total.update(file.read(_BLOCK))
        progress.add(size)
