"""A process that serves one model, as the front starts, reaches and ends it.

The process ends when its standard input does. So it never outlives the front, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from mlxrun.cluster.models.messages import (
    DescribeModels,
    DigestModels,
    ServeModel,
    receive_message,
    write_message,
)
from mlxrun.cluster.models.model_slot import Record
from mlxrun.core.errors import ModelLoadError

PROGRAM = (sys.executable, "-m", "mlxrun.cli.model_process")
ENDING = 10.0  # seconds beyond the time limit of its requests that a process has to end


async def _start(message: DescribeModels | DigestModels | ServeModel) -> Process:
    """Start a process with a message. It has a session of its own, so that Ctrl-C reaches the front only."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=1 << 24
    )
    assert process.stdin is not None
    packed = io.BytesIO()
    write_message(packed, message)
    process.stdin.write(packed.getvalue())
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
    return process


async def inspect_models(message: DescribeModels | DigestModels) -> Any:
    """Get the answer to a message from a process that ends then, so that the front needs none of its
    memory."""
    process = await _start(message)
    assert process.stdout is not None
    try:
        return await receive_message(process.stdout)
    except EOFError as error:
        raise ModelLoadError("the process that looks at the models has died; the log says why") from error
    finally:
        await _end(process, 0.0)  # it has nothing to save, and would look for as long as a hub is silent


class ModelProcess:
    """One life of a model: `model_pool.ModelWorker`. `patience`: seconds that its requests have to finish;
    `record`: gets what it reports of API keys."""

    def __init__(self, spec: ServeModel, patience: float, record: Record) -> None:
        self._spec = spec
        self._patience = patience
        self._record = record
        self._process: Process | None = None
        self._reading: asyncio.Task[str | None] | None = None

    async def start(self) -> str:
        """Load the model, and return its URL. ModelLoadError or ConfigError if that fails."""
        self._process = process = await _start(self._spec)
        assert process.stdout is not None
        try:
            found = await receive_message(process.stdout)
        except EOFError:
            raise ModelLoadError(await self._describe_death("while it loaded the model")) from None
        if isinstance(found, Exception):
            raise found
        self._reading = asyncio.create_task(self._read(process.stdout))
        return str(found)

    async def _read(self, stream: asyncio.StreamReader) -> str | None:
        """Record what the process reports, until it ends. Return why its engine died, if it says so."""
        with contextlib.suppress(EOFError):
            while not isinstance(found := await receive_message(stream), str):
                self._record(found)
            return found
        return None

    async def wait_dead(self) -> str:
        """Wait until the process has ended, or its engine died, and return why."""
        assert self._reading is not None
        why = await asyncio.shield(self._reading)
        return await self._describe_death("while it served") if why is None else why

    def start_draining(self) -> None:
        """Have it finish its requests within `server.drain_timeout`, and end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        """End the process, once its prefix cache is written."""
        if self._process is not None:
            await _end(self._process, self._patience + ENDING)
        if self._reading is not None:
            await self._reading

    async def _describe_death(self, when: str) -> str:
        assert self._process is not None
        code = await self._process.wait()
        if code == -signal.SIGKILL:  # of which it could write nothing
            return f"its process was killed from outside {when} (signal 9), as systems do if memory is short"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process has ended {when} ({how}); the log says why"


async def _end(process: Process, patience: float) -> None:
    """End a process by the end of its input; after `patience` seconds, or if this task is cancelled, kill
    it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(patience):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
