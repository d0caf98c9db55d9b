"""The server from start to exit code: listening, loading, draining, signals, and the engine's death."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

import aiohttp
import pytest
from aiohttp import web

from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.media_settings import AudioSampling
from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.config.settings import ApiSettings, Config, ServerSettings
from mlxrun.core.errors import ConfigError, EngineDead, ModelLoadError
from mlxrun.core.request import PooledModel
from mlxrun.core.workers import wait_until_done
from mlxrun.engine.client import EngineClient
from mlxrun.jobs.run.job_service import JobService
from mlxrun.server import lifecycle
from mlxrun.server.app import make_app
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from mlxrun.server.endpoints import admin
from mlxrun.server.engine_state import LoadedEngine
from mlxrun.server.lifecycle import (
    drain,
    handle_signals,
    make_url,
    run,
)
from mlxrun.server.welcome import FIRST_REQUESTS, format_welcome, list_served
from tests.helpers.command_processes import PATIENCE
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import (
    MINI,
    AppView,
    FakeEngine,
    make_chat_body,
    make_script,
    run_server,
    server_config,
)
from tests.helpers.tokenizers import FakeModelInfo

ONLY = [MINI, admin.SURFACE]


class Life:
    """A server that runs as `mlxrun serve` does, with a fake engine and a stop that is no signal."""

    def __init__(
        self, engine: FakeEngine | None = None, apis: ApiSettings | None = None, **fields: Any
    ) -> None:
        self.engine = engine or FakeEngine()
        self.config = replace(server_config(**fields), apis=apis or ApiSettings())
        self.app = make_app(self.config)
        self.said: list[str] = []
        self.stop = asyncio.Event()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.load_error: Exception | None = None
        self.task = asyncio.create_task(self._run())

    @property
    def view(self) -> AppView:
        return AppView(self.app)

    async def _load(self) -> Any:
        await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        context = ApiContext(self.engine.model_info, self.config, MediaLoader(self.config.media, None))
        return LoadedEngine(cast(EngineClient, self.engine), context, {})

    async def _run(self) -> int:
        return await run(self.app, self._load, self.said.append, stop=self.stop)

    async def url(self) -> str:
        await until(lambda: self.said or self.task.done())
        found = re.search(r"http://\S+?(?=;)", self.said[0])
        assert found
        return found[0]

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(await self.url() + path, json=body) as response,
        ):
            return response.status, await response.json()

    async def ready(self) -> None:
        await until(lambda: len(self.said) >= 2 or self.task.done())


async def test_the_output_names_the_address_and_a_first_request() -> None:
    life = Life()
    await life.ready()
    assert life.said[0] == f"listening on {await life.url()}; loading embedded"
    assert life.said[1].startswith("ready: fake, text, context of 4096 tokens; openai, responses, anthropic")
    assert f"curl {await life.url()}/v1/chat/completions -H 'Content-Type" in life.said[2]
    assert life.said[3] == f"  {await life.url()}/ui in a browser"
    assert life.view.state.read_stats()[0]["steps"] == 7
    status, reply = await life.post("/v1/chat/completions", make_chat_body())
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hello world!")
    life.stop.set()
    assert await life.task == 0
    assert life.engine.closed


async def test_the_switch_interval_is_short_while_the_server_runs() -> None:
    """Python's own interval is there again afterwards, whatever it was."""
    before = sys.getswitchinterval()
    life = Life()
    await life.ready()
    assert sys.getswitchinterval() == pytest.approx(lifecycle.SWITCH_INTERVAL) != pytest.approx(before)
    life.stop.set()
    assert await life.task == 0
    assert sys.getswitchinterval() == before
    failed = Life()
    failed.load_error = ModelLoadError("no such model")
    with pytest.raises(ModelLoadError):
        await failed.task
    assert sys.getswitchinterval() == before


async def test_the_first_request_has_a_key_if_one_is_required() -> None:
    life = Life(api_keys={"a": "sesame"})
    await life.ready()
    assert "-H 'Authorization: Bearer YOUR_KEY'" in life.said[2]
    assert "sesame" not in " ".join(life.said)
    life.stop.set()
    assert await life.task == 0


async def test_weak_keys_are_warned_of_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    strong = "0123456789abcdef"
    life = Life(api_keys={"a": "sesame", "b": strong, "c": ApiKeySettings("ab" * 20)})
    await life.ready()
    warned = [each.getMessage() for each in caplog.records if "weak" in each.getMessage()]
    assert [text.partition(":")[2].partition(";")[0] for text in warned] == [
        " the key of a is weak: it has 6 characters, 4 of them different",
        " the key of c is weak: it has 40 characters, 2 of them different",
    ]
    assert not any(key in caplog.text for key in ("sesame", strong, "abab"))
    life.stop.set()
    assert await life.task == 0


async def test_the_server_listens_before_the_model_is_loaded() -> None:
    life = Life()
    life.load_gate.clear()
    assert (await life.post("/v1/chat/completions", make_chat_body()))[0] == 503
    life.load_gate.set()
    await life.ready()
    assert (await life.post("/v1/chat/completions", make_chat_body()))[0] == 200
    life.stop.set()
    assert await life.task == 0


async def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    life = Life()
    life.load_error = ModelLoadError("no such model")
    with pytest.raises(ModelLoadError, match="no such model") as caught:
        await life.task
    assert caught.value.exit_code == 3


async def test_a_stop_while_the_model_loads() -> None:
    life = Life()
    life.load_gate.clear()
    await life.url()
    life.stop.set()
    assert await life.task == 0


async def test_a_stop_while_a_load_cannot_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(lifecycle, "GRACE_SECONDS", 0.02)
    monkeypatch.setattr(os, "_exit", leave)
    gate = asyncio.Event()
    life = Life()

    async def stubborn() -> Any:
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        raise ModelLoadError("late")

    life._load = stubborn  # type: ignore[method-assign]
    await life.url()
    life.stop.set()
    with pytest.raises(Exited):
        await life.task
    gate.set()
    await asyncio.sleep(0)


async def test_a_drain_lets_running_requests_finish() -> None:
    """SIGTERM: new requests get 503 and Retry-After, running ones their answer; exit code 0."""
    gate = asyncio.Event()
    life = Life(FakeEngine(script=make_script("ab", gate.wait, "cd")), drain_timeout=60)
    await life.ready()
    received = [asyncio.create_task(life.post("/v1/chat/completions", make_chat_body())) for _ in range(3)]
    await until(lambda: len(life.view.live) == 3)
    life.stop.set()
    await until(lambda: life.view.state.draining)
    async with aiohttp.ClientSession() as http:
        async with http.post(await life.url() + "/v1/chat/completions", json=make_chat_body()) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
            assert (await response.json())["error"]["code"] == "shutting_down"
        async with http.get(await life.url() + "/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
    assert not life.task.done()
    assert not life.engine.closed
    gate.set()
    for task in received:
        status, reply = await task
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "abcd")
    assert await life.task == 0
    assert life.engine.closed
    assert life.engine.aborted == []


async def test_a_drain_has_a_time_limit() -> None:
    forever = asyncio.Event()
    life = Life(FakeEngine(script=make_script("ab", forever.wait)), drain_timeout=0.05)
    await life.ready()
    received = asyncio.create_task(life.post("/v1/chat/completions", make_chat_body()))
    await until(lambda: len(life.view.live) == 1)
    life.stop.set()
    status, reply = await received
    assert (status, reply["error"]["code"]) == (503, "shutting_down")
    assert await life.task == 0
    assert len(life.engine.aborted) == 1


@pytest.mark.parametrize("twin", [False, True], ids=["guard", "twin"])
async def test_a_drain_answers_what_is_not_prepared(monkeypatch: pytest.MonkeyPatch, twin: bool) -> None:
    """Such as a PDF whose process stands still; without the guard, the connection is cut."""
    monkeypatch.setattr(lifecycle, "GRACE_SECONDS", 0.5)
    if twin:
        monkeypatch.setattr("mlxrun.server.engine_state.ActiveCount.end_all", lambda self, error: None)

    async def prepare(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("mlxrun.server.endpoints.openai.prepare_request", prepare)
    life = Life(drain_timeout=0.05)
    await life.ready()
    received = asyncio.create_task(life.post("/v1/chat/completions", make_chat_body()))
    await until(lambda: life.view.state.active.count == 1)
    life.stop.set()
    if twin:
        with pytest.raises(aiohttp.ClientError):
            await received
    else:
        status, reply = await received
        assert (status, reply["error"]["code"]) == (503, "shutting_down")
    assert await life.task == 0


async def test_a_drain_closes_the_batch_queue() -> None:
    class Batches:
        closed = False

        async def close(self) -> None:
            self.closed = True

    batches = Batches()
    async with run_server(surfaces=ONLY, batches=cast(BatchQueue, batches)) as s:
        await drain(s.app)
        assert batches.closed


async def test_a_drain_does_not_wait_for_a_batch_that_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one whose files are on a disk that hangs; it is cancelled all the same."""
    ended = asyncio.Event()

    class Batches:
        async def close(self) -> None:
            await wait_until_done(asyncio.ensure_future(ended.wait()))

    monkeypatch.setattr(lifecycle, "GRACE_SECONDS", 0.05)
    async with run_server(surfaces=ONLY, batches=cast(BatchQueue, Batches())) as s:
        async with asyncio.timeout(PATIENCE):
            await drain(s.app)
        assert not ended.is_set() and "a batch could not be stopped in time" in caplog.text
        ended.set()


@pytest.mark.parametrize("apis", [*FIRST_REQUESTS, "none", "all"])
@pytest.mark.parametrize("secret", ["", "s3cret"])
async def test_the_welcome_names_what_is_served_and_a_first_request(apis: str, secret: str) -> None:
    """Each API once, `batches` only with its folder; the command is run as it was written."""
    switches = {name: apis in (name, "all") for name in asdict(ApiSettings())}
    server = ServerSettings(port=0, api_keys={"me": secret} if secret else {})
    config = Config(server=server, apis=ApiSettings(**switches))
    async with run_server(config, model_info=FakeModelInfo(names=("only",))) as s:
        _, _, rest = "\n".join(format_welcome(s.app, "http://here")).partition("tokens; ")
        names, _, command = rest.partition("; ")
        absent = ("batches", "embeddings", "transcriptions")
        expected = {
            "all": ", ".join(name for name in FIRST_REQUESTS if name not in absent),
            **dict.fromkeys([*absent, "none"], "every API is switched off (apis)"),
        }
        assert names == expected.get(apis, apis)
        words = shlex.split(command.partition("\n")[2])
        headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
        headers = {key: value.replace("YOUR_KEY", secret) for key, value in headers.items()}
        data = words[words.index("-d") + 1].encode() if "-d" in words else None
        method, path = "POST" if data else "GET", words[1].removeprefix("http://here")
        async with s.http.request(method, f"{s.url}{path}", headers=headers, data=data) as response:
            assert response.status == 200


async def test_the_welcome_names_batches_once_if_their_folder_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second server on the same folder serves none until the first has ended."""
    first, second = (BatchQueue(Storage(tmp_path, 1_000)) for _ in range(2))
    app, other = (make_app(server_config(), queue) for queue in (first, second))
    expected = [name for name in FIRST_REQUESTS if name not in ("embeddings", "transcriptions")]
    service = cast(JobService, object())
    await first.start(service)
    await second.start(service)
    assert list_served(app) == expected and "files and batches are not served" in caplog.text
    assert list_served(other) == [name for name in expected if name != "batches"]
    await first.close()
    await second.open()
    assert list_served(other) == expected
    await second.close()


@pytest.mark.parametrize(
    ("apis", "path"),
    [
        ({}, "/v1/completions"),
        ({"openai": False}, "/tokenize"),
        ({"openai": False, "tokenize": False}, "/v1/status"),
    ],
)
async def test_a_model_without_a_chat_template_is_asked_for_a_completion(
    apis: dict[str, bool], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The command works, and one warning says what does not."""
    life = Life(FakeEngine(FakeModelInfo(chat_template=None)), ApiSettings(**apis))
    await life.ready()
    command = shlex.split(life.said[2])
    assert command[1].endswith(path)
    if "-d" in command:
        assert (await life.post(path, json.loads(command[command.index("-d") + 1])))[0] == 200
    messages = [record.getMessage() for record in caplog.records if "chat template" in record.getMessage()]
    assert len(messages) == 1 and "/v1/messages, /api/chat answer 400; set model.chat_template" in messages[0]
    life.stop.set()
    assert await life.task == 0


@pytest.mark.parametrize(("task", "path"), [("embed", "/v1/embeddings"), ("score", "/v1/rerank")])
async def test_the_welcome_of_a_model_that_does_not_generate(
    task: Literal["embed", "score"], path: str
) -> None:
    async with run_server(model_info=FakeModelInfo(pooled=PooledModel(task, 4, 100))) as s:
        welcome = "\n".join(format_welcome(s.app, "http://here"))
    assert "; embeddings, tokenize, admin, ui; " in welcome and f"curl http://here{path} " in welcome


async def test_the_welcome_says_that_a_model_hears() -> None:
    info = FakeModelInfo(vision=True, audio_sampling=AudioSampling(16_000))
    async with run_server(model_info=info) as s:
        assert "ready: fake, images, audio and text, context" in format_welcome(s.app, "http://here")[0]


@pytest.mark.parametrize("policy", ["exit", "stay"])
async def test_the_engine_dies(policy: str) -> None:
    """By policy the process ends with 3 once everybody has an answer, or stays and says so."""
    forever = asyncio.Event()
    life = Life(FakeEngine(script=make_script("ab", forever.wait)), on_engine_failure=policy)
    await life.ready()
    received = asyncio.create_task(life.post("/v1/chat/completions", make_chat_body()))
    await until(lambda: len(life.view.live) == 1)
    life.engine.die(EngineDead("the device is gone"))
    status, reply = await received
    assert (status, reply["error"]["message"]) == (503, "the device is gone")
    if policy == "stay":
        status, reply = await life.post("/v1/chat/completions", make_chat_body())
        assert (status, reply["error"]["code"]) == (503, "engine_unavailable")
        assert not life.task.done()
        life.stop.set()
    assert await life.task == 3
    if policy == "exit":
        assert "the engine has died: the device is gone" in life.said


async def test_an_address_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo
    codes = {"none.invalid": socket.EAI_NONAME, "later.invalid": socket.EAI_AGAIN}

    def fail_at_names(host: Any, *args: Any, **options: Any) -> Any:
        if host in codes:
            raise socket.gaierror(codes[host], "no answer")
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fail_at_names)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port, taken = other.getsockname()[1], os.strerror(errno.EADDRINUSE)
        config = server_config()
        for fields, said in (
            (
                {"port": port},
                f"server.port: cannot listen on 127.0.0.1:{port}: {taken}; `--port 0` takes",
            ),
            ({"host": "192.0.2.1"}, "server.host: cannot listen on 192.0.2.1:0"),
            ({"host": "none.invalid"}, "server.host: the host name 'none.invalid' does not exist"),
            (
                {"host": "later.invalid"},
                "server.host: 'later.invalid' is not an address of this machine: no answer",
            ),
            ({"host": "no..host"}, "server.host: the host name 'no..host' does not exist"),
        ):
            app = make_app(replace(config, server=replace(config.server, **fields)))
            app.cleanup_ctx.append(open_files)
            with pytest.raises(ConfigError) as caught:
                await run(app, None, print, stop=asyncio.Event())  # type: ignore[arg-type]
            assert said in str(caught.value)


async def open_files(app: web.Application) -> AsyncIterator[None]:
    """Files that another process may hold, such as the one on the same port."""
    raise AssertionError("the address comes first")
    yield


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_url_for_a_client_on_this_machine(host: str, url: str) -> None:
    assert make_url(host, 80) == url


@pytest.mark.parametrize(
    ("terminal", "ignored", "stops"),
    [
        ([False, False], False, False),
        ([True, True], False, False),
        ([True, False], False, True),
        ([True, False], True, False),
    ],
    ids=["service", "terminal", "closed", "nohup"],
)
async def test_a_hangup_reloads_unless_the_terminal_is_gone(
    terminal: list[bool], ignored: bool, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "has_terminal", lambda: terminal.pop(0))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    said: list[str] = []
    stop, reloaded = asyncio.Event(), asyncio.Event()
    try:
        with handle_signals(stop, said.append, reloaded.set):
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: stop.is_set() or reloaded.is_set())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (stop.is_set(), reloaded.is_set(), len(said)) == (stops, not stops, int(stops))


async def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    said: list[str] = []
    stop = asyncio.Event()
    with handle_signals(stop, said.append):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 60)
        assert (codes, len(said)) == ([], 1)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: codes)
    assert codes == [128 + signal.SIGINT]
