"""Inspect AI's provider of models in this process: `inspect eval task.py --model mlxrun/NAME`.

NAME is a config file, the path or hub id of a model, or `default`. `-M section.key=value` does what `--set`
does for a command. This needs Inspect, and the `openai` package for the types of its converters.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from typing import Any

from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelCall,
    ModelOutput,
    messages_to_openai,
    model_output_from_openai,
)
from inspect_ai.tool import ToolChoice, ToolFunction, ToolInfo

from mlxrun.api.openai.response import build_error
from mlxrun.api.text.tokens.tokens import tokenize
from mlxrun.core.errors import Overloaded, PromptTooLong, RequestError
from mlxrun.evals.harnesses.inspect_bodies import build_chat_body
from mlxrun.evals.harnesses.local_engine import LocalEngine, load_harness_config
from mlxrun.jobs.agents.agent_settings import CHAT

Json = dict[str, Any]


class InspectProvider(ModelAPI):
    """A model of this process. Equal requests get different seeds, in their order. So epochs differ, and the
    same evaluation gives the same answers again."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as in Inspect's own providers
        **model_args: Any,
    ) -> None:
        """Load the model, unless another provider with the same settings has loaded it. `model_args`: config
        keys. ValueError for a `base_url`."""
        super().__init__(model_name, base_url, api_key, [], config)
        if base_url is not None:
            raise ValueError("mlxrun/... runs in this process; a server's model is openai-api/mlxrun/...")
        self._loaded = load_harness_config(model_name, model_args)
        self._engine: LocalEngine | None = LocalEngine.open(self._loaded)
        self._seen: Counter[str] = Counter()  # equal requests so far, by digest

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Return the answer, and the request and response in the endpoint's form, for the log."""
        functions = [tool.model_dump(exclude_none=True, exclude={"options"}) for tool in tools]
        choice = {"name": tool_choice.name} if isinstance(tool_choice, ToolFunction) else tool_choice
        messages = await messages_to_openai(input)
        body = build_chat_body(messages, functions, choice, config.model_dump(exclude_none=True))
        call = ModelCall.create(body, None, _omit_images)
        started = time.monotonic()
        try:
            future = self._open_engine().answer(CHAT, body, self._name_request(body))
            answer = await asyncio.wrap_future(future)
        except RequestError as error:
            call.set_error(build_error(error), time.monotonic() - started)
            if not isinstance(error, PromptTooLong):
                return error, call
            # A task may handle an answer that says that the context is full.
            full = ModelOutput.from_content(self.model_name, str(error), stop_reason="model_length")
            return full, call
        call.set_response(answer, time.monotonic() - started)
        return await model_output_from_openai(answer), call

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer puts around it."""
        info = self._open_engine().model_info
        return list((await asyncio.to_thread(tokenize, info, text, add_special_tokens=True)).ids)

    async def count_text_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        info = self._open_engine().model_info
        return len((await asyncio.to_thread(tokenize, info, text, add_special_tokens=False)).ids)

    def max_connections(self) -> int:
        """Twice the engine's running requests, so that some wait."""
        return 2 * self._loaded.config.scheduler.max_running

    def connection_key(self) -> str:
        """The key of the settings: models with the same settings share one engine."""
        return self._loaded.digest

    def should_retry(self, ex: BaseException) -> bool:
        """Whether the queue was full: nothing else is worth another try."""
        return isinstance(ex, Overloaded)

    def close(self) -> None:
        """Stop the engine, unless another model of this process uses it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _open_engine(self) -> LocalEngine:
        """The engine, which is started again if the model was closed before."""
        if self._engine is None:
            self._engine = LocalEngine.open(self._loaded)
        return self._engine

    def _name_request(self, body: Json) -> str:
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self._seen[digest] += 1
        return hashlib.sha256(f"{digest}:{self._seen[digest]}".encode()).hexdigest()


def _omit_images(key: Any, value: Any) -> Any:
    """A part of a request for the log, which has the images of its samples already."""
    if key == "image_url" and isinstance(value, dict) and str(value.get("url")).startswith("data:"):
        return {**value, "url": "<base64-data-removed>"}
    return value
