"""Checks the body of a job line without a model: the names and types of its fields, its messages and items.

What depends on the model or on a config (its template, its context, images) is checked by `--dry-run`.
"""

from __future__ import annotations

from mlxrun.api.anthropic.chat_messages import ChatMessagesBuilder
from mlxrun.api.anthropic.fields import check_body as check_message_body
from mlxrun.api.openai.fields import BODIES, URLS
from mlxrun.api.openai.offered_tools import read_offered_tools
from mlxrun.api.openai.pooled import check_pooling_body
from mlxrun.api.responses.fields import BODY as RESPONSE_BODY
from mlxrun.api.responses.input_items import ItemSource, read_input_items
from mlxrun.api.responses.tools import read_tools
from mlxrun.api.text.messages import normalize_messages
from mlxrun.config.settings import ServerSettings
from mlxrun.core.field_errors import reject
from mlxrun.jobs.lines.job_file import MESSAGE, POOLED, RESPONSE, JobLine


def check_line_body(line: JobLine) -> None:
    """RequestError if no model could answer the line."""
    if line.url == MESSAGE:
        given = check_message_body(line.body, False)
        ChatMessagesBuilder({}, ServerSettings(), complete=True).add_messages(given["messages"])
    elif line.url == RESPONSE:
        given = RESPONSE_BODY.check(line.body)
        read_tools(given)
        read_input_items(given.get("input", []), ItemSource("check"))
    elif line.url in POOLED:
        check_pooling_body(line.url, line.body)
    else:
        given = BODIES[URLS[line.url]].check(line.body)
        required = "messages" if URLS[line.url] == "chat" else "prompt"
        if required not in given:
            reject(required, "missing", code="missing_field")
        if required == "messages":
            normalize_messages(given["messages"])
            read_offered_tools(given)
