"""The two shapes of /v1/files on one storage: Anthropic's for requests with its headers, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from mlxrun.api.anthropic.response import format_time
from mlxrun.core.field_errors import quote, reject
from mlxrun.server.batches.storage import StoredFile
from mlxrun.server.http.pagination import (
    make_anthropic_page,
    make_page,
    parse_number,
    read_query,
    sort_by_order,
)
from mlxrun.server.http.surface import is_anthropic

PURPOSE = "batch"
USER_DATA = "user_data"  # files of any use
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
OPENAI_SECONDS = (3600, 30 * 86_400)  # of an expiry
_ANTHROPIC_SECONDS = (3600, 90 * 86_400)
_MOST_IDS = 100

Json = dict[str, Any]


class OpenAIFiles:
    """OpenAI's files. `fields`: those of the form besides the file. `id_prefix`: of new files' ids."""

    fields = ("purpose", ANCHOR, SECONDS)
    id_prefix = "file-"

    def check_field(self, name: str, text: str) -> None:
        """Check one field of a form before the rest of the form has arrived. RequestError if it is wrong."""
        allowed = {"purpose": (PURPOSE, USER_DATA), ANCHOR: ("created_at",)}.get(name)
        if allowed is None:
            _check_seconds(text, name, OPENAI_SECONDS)
        elif text not in allowed:
            names = " and ".join(map(repr, allowed))
            reject(name, f"only {names} {'is' if len(allowed) == 1 else 'are'} supported, not {quote(text)}")

    def read_fields(self, given: Mapping[str, str]) -> tuple[str, int | None]:
        """Read a file's purpose, and the seconds until it expires (None: never), from its form."""
        expires = ANCHOR in given or SECONDS in given
        for name in ("purpose", *((ANCHOR, SECONDS) if expires else ())):
            if name not in given:
                reject(name, "missing", code="missing_field")
        return given["purpose"], int(given[SECONDS]) if expires else None

    def describe(self, file: StoredFile) -> Json:
        return file.describe()

    def describe_deleted(self, file_id: str) -> Json:
        return {"id": file_id, "object": "file", "deleted": True}

    def make_page(self, request: web.Request, files: Sequence[StoredFile]) -> Json:
        """Build the page that the URL asks for. `files`: newest first."""
        query = read_query(request, ("after", "limit", "order", "purpose"))
        purpose = query.get("purpose")
        found = [file for file in files if purpose in (None, file.purpose)]
        return make_page(sort_by_order(found, query), query, self.describe, default=10_000, most=10_000)


class AnthropicFiles:
    """Anthropic's files. They have the purpose of OpenAI's files of any use."""

    fields = ("expires_in_seconds",)
    id_prefix = "file_"

    def check_field(self, name: str, text: str) -> None:
        _check_seconds(text, name, _ANTHROPIC_SECONDS)

    def read_fields(self, given: Mapping[str, str]) -> tuple[str, int | None]:
        seconds = given.get(self.fields[0])
        return USER_DATA, None if seconds is None else int(seconds)

    def describe(self, file: StoredFile) -> Json:
        return {
            "id": file.id,
            "type": "file",
            "filename": file.filename,
            "mime_type": file.media_type,
            "size_bytes": file.bytes,
            "created_at": format_time(file.created_at),
            "expires_at": format_time(file.expires_at),
            "downloadable": True,
        }

    def describe_deleted(self, file_id: str) -> Json:
        return {"id": file_id, "type": "file_deleted"}

    def make_page(self, request: web.Request, files: Sequence[StoredFile]) -> Json:
        names = ("after_id", "before_id", "page", "limit", "ids", "ids[]", "scope_id", "beta")
        query = read_query(request, names)
        if query.get("scope_id"):
            files = []  # files belong to no session
        given = [*request.query.getall("ids", ()), *request.query.getall("ids[]", ())]
        ids = {name for text in given for name in text.split(",")}
        if len(ids) > _MOST_IDS:
            reject("ids", f"has {len(ids)} entries; at most {_MOST_IDS} are allowed")
        if ids:
            for name in ("page", "limit"):
                if name in query:
                    reject(name, "not together with ids")
            files = [file for file in files if file.id in ids]
            query["limit"] = str(_MOST_IDS)
        if "page" in query:
            query["after_id"] = query["page"]
        page = make_anthropic_page(files, query, self.describe)
        return {**page, "next_page": page["last_id"] if page["has_more"] else None}


def _check_seconds(text: str, name: str, limits: tuple[int, int]) -> None:
    parse_number(text, name, *limits, "a number of seconds")


FileShape = OpenAIFiles | AnthropicFiles
OPENAI, ANTHROPIC = OpenAIFiles(), AnthropicFiles()


def choose_shape(request: web.Request) -> FileShape:
    """Choose the shape of a request by its headers."""
    return ANTHROPIC if is_anthropic(request) else OPENAI
