"""The messages between the front of several models and their processes, and what a model is known by before
it is loaded.

A message is a pickled object behind its length. Both ends are mlxrun, and the pipe is private to them.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.cluster.messages import SentLine
from mlxrun.config.settings import Config
from mlxrun.jobs.records.output_records import BatchStamp

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as clients see it, without its weights. `names`: all that requests may use; `tasks`,
    `modalities`: as `list_tasks` and `list_modalities` say; `listed`: its objects in /v1/models; `tags`,
    `shown`: in Ollama's /api/tags and /api/show. `needed`: bytes of memory with which it serves 32k tokens;
    `weights`: those of its weights, of `needed`. `shortage`: see FitReport."""

    names: Sequence[str]
    tasks: Sequence[str]
    modalities: Sequence[str]
    context_length: int
    needed: int
    weights: int
    shortage: str | None
    listed: Sequence[Mapping[str, Any]]
    tags: Sequence[Mapping[str, Any]]
    shown: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelsFacts:
    """The answer to DescribeModels: facts of each model, or what is wrong with it; `limit`: bytes that all
    models together may use, 0 if unknown."""

    models: Sequence[ModelFacts | Exception]
    limit: int


@dataclass(frozen=True, slots=True)
class DescribeModels:
    """The request for ModelsFacts of the models of these configs."""

    configs: Sequence[Config]


@dataclass(frozen=True, slots=True)
class DigestModels:
    """The request for a text that changes when one of these configs, or the files of its model, would give
    other answers. It may take seconds."""

    configs: Sequence[Config]


@dataclass(frozen=True, slots=True)
class ServeModel:
    """The request to serve a model until the pipe ends. `number`: of the model, for the ids that it makes;
    `secret`: what it demands from the front; `responses_path`: as in `make_app`. The answers: its URL, or an
    error; later KeyReports, and why it died."""

    config: Config
    number: int
    secret: str
    responses_path: Path | None


@dataclass(frozen=True, slots=True)
class TokensUsed:
    """What a process reports at the end of a request with an API key: the key's name, and the tokens."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class BackgroundBegun:
    """What it reports when a response in the background begins. `request_id`: of the request for it;
    `number`: its own, among all of the process."""

    key: str
    request_id: str
    number: int


@dataclass(frozen=True, slots=True)
class BackgroundEnded:
    """What it reports when the response in the background with this number has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of a batch on its way to a process, which answers with a LineResult. The contents of files are
    in its body. `stamp`: of its batch."""

    sent: SentLine
    stamp: BatchStamp | None


KeyReport = TokensUsed | BackgroundBegun | BackgroundEnded


def write_message(file: BinaryIO, message: object) -> None:
    """Write a message to a pipe."""
    data = pickle.dumps(message)
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read_message(file: BinaryIO) -> Any:
    """Read a message from a pipe. EOFError if it ends."""
    head = file.read(_LENGTH.size)
    data = file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not data:
        raise EOFError
    return pickle.loads(data)


async def receive_message(stream: asyncio.StreamReader) -> Any:
    """Read a message from a stream. EOFError if it ends."""
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))  # IncompleteReadError is an EOFError
    return pickle.loads(await stream.readexactly(length))
