"""Models of the Hugging Face hub: their names, what is in the local cache, downloads and removal.

A short name such as `qwen3-8b-4bit` is the last part of a hub id in any case. `find_hub_id` looks for it in
the local cache first, then among the models of mlx-community on the hub. Config files name models in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxrun.config.contradictions import HUB_ID
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.field_errors import suggest
from mlxrun.core.hub_connection import check_hub, is_unreachable
from mlxrun.model.load.model_files import SMALL_FILES, UNREAD_FILES, WEIGHT_FILES

COMMUNITY = "mlx-community"  # the hub's collection of models in MLX's own form
_SHORT_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_MAX_FOUND = 200  # models that the hub lists for a name
_OFFLINE = "the hub cannot be reached"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the local cache. `folder`: its newest snapshot; `size`: bytes on disk; `used`: seconds since
    1970."""

    id: str
    folder: Path
    size: int
    used: float


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub. `size`: bytes of the files that are wanted; `missing`: of those that must come."""

    id: str
    licence: str | None
    size: int
    missing: int


def is_short_name(text: str) -> bool:
    """Whether the text can only be a short name: it is no path, no hub id and not `embedded`."""
    if text == "embedded" or text.endswith(".gguf") or not _SHORT_NAME.fullmatch(text):
        return False
    return not Path(text).is_dir()


def is_hub_id(text: str) -> bool:
    """Whether the text is the full id of a model on the hub; a folder with such a path comes first."""
    return HUB_ID.fullmatch(text) is not None and not Path(text).exists()


def list_cached_models() -> list[CachedModel]:
    """The models in the local cache, sorted by id. Those without a config.json are skipped: they are no
    models, or incomplete."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, RuntimeError):  # there is none, or the home folder is unknown
        return []
    found = []
    for repo in repos:
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        folder = newest.snapshot_path if newest is not None and repo.repo_type == "model" else None
        if folder is not None and (folder / "config.json").exists():
            found.append(CachedModel(repo.repo_id, folder, repo.size_on_disk, repo.last_accessed))
    return sorted(found, key=lambda model: model.id.casefold())


def find_hub_id(name: str) -> str:
    """The full id of the model with a short name. ModelLoadError, with similar names, if there is none."""
    local = [model.id for model in list_cached_models()]
    matches = [each for each in local if _shorten(each) == name.casefold()]
    if matches:
        return min(matches, key=lambda each: not each.startswith(f"{COMMUNITY}/"))
    known = {_shorten(each): each for each in _search_community(name, local)}
    if (found := known.get(name.casefold())) is not None:
        return found
    hint = suggest(name.casefold(), [*known, *map(_shorten, local), "embedded"])
    hint = hint or "; a model of another owner is named in full, such as Qwen/Qwen3-0.6B"
    raise ModelLoadError(
        f"{name!r} is neither a folder nor the name of a model in the local cache or of {COMMUNITY}{hint}"
    )


def _shorten(hub_id: str) -> str:
    return hub_id.rpartition("/")[2].casefold()


def _search_community(name: str, local: Sequence[str]) -> list[str]:
    """Ids of the community's models whose names are like this."""
    from huggingface_hub import HfApi

    first = re.split(r"[-_.]", name)[0]
    api, found = HfApi(), []
    with convert_hub_errors(name, local):
        for query in dict.fromkeys((name, first)):
            found += [model.id for model in api.list_models(author=COMMUNITY, search=query, limit=_MAX_FOUND)]
            if any(_shorten(each) == name.casefold() for each in found):
                break
    return found


def look_up(hub_id: str, revision: str | None = None) -> HubModel:
    """What the hub says of a model, before its weights are downloaded. ModelLoadError if it has none."""
    from huggingface_hub import HfApi, snapshot_download

    with convert_hub_errors(hub_id):
        info = HfApi().model_info(hub_id, revision=revision)
        patterns = [*SMALL_FILES, *WEIGHT_FILES]
        wanted = snapshot_download(
            hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=UNREAD_FILES, dry_run=True
        )
    sizes = [(file.file_size or 0, file.will_download) for file in wanted]
    licence = info.card_data.get("license") if info.card_data else None
    tagged = (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:"))
    return HubModel(
        info.id,
        licence if isinstance(licence, str) else next(tagged, None),
        sum(size for size, _ in sizes),
        sum(size for size, is_missing in sizes if is_missing),
    )


def remove_cached_model(hub_id: str) -> int:
    """Remove all revisions of a model from the local cache; returns the bytes that this frees."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir()
    own = [repo for repo in cache.repos if (repo.repo_type, repo.repo_id) == ("model", hub_id)]
    strategy = cache.delete_revisions(*(each.commit_hash for repo in own for each in repo.revisions))
    strategy.execute()
    return strategy.expected_freed_size


@contextmanager
def convert_hub_errors(name: str, local: Sequence[str] = ()) -> Iterator[None]:
    """Turn the hub's errors into sentences, and the first one is whether it can be reached. `local`: names
    that are in the cache."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        check_hub()
        yield
    except GatedRepoError as error:
        text = f"{name}: agree to its terms on the hub first, and log in (hf auth login)"
        raise ModelLoadError(text) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{name}: the hub has no such revision of it") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{name}: the hub has no such model, or only for others") from error
    except HfHubHTTPError as error:
        raise ModelLoadError(f"{name}: the hub answered: {error}") from error
    except Exception as error:
        if not is_unreachable(error):
            raise
        raise ModelLoadError(_explain_offline(name, local)) from error


def _explain_offline(name: str, local: Sequence[str]) -> str:
    hint = suggest(name.casefold(), [*map(_shorten, local), "embedded"])
    missing = f"{name!r} is neither a folder nor a model in the local cache, and {_OFFLINE}"
    return missing + (hint or "; `mlxrun list` names the models that are here")
