"""lm-evaluation-harness' model `mlxrun`: a model in the harness' own process.

    mlxrun-lm-eval --model mlxrun --model_args config=qwen.yaml --tasks arc_easy

Texts become tokens as in the harness' `hf` model. All requests of a task run on the engine at once, and
contexts that they share are computed once. `batch_size` and `device` have no effect: the config decides.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.progress import Progress

from mlxrun import __version__
from mlxrun.api.choice import Choice
from mlxrun.api.openai.fields import COMPLETION_URL
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.parsers.registry import detect_formats
from mlxrun.api.prepared import ApiContext
from mlxrun.api.sampling_params import MAX_STOPS
from mlxrun.api.text.continuation import render_continuation
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.messages import normalize_messages
from mlxrun.api.text.templates.template import render_chat
from mlxrun.api.text.templates.template_support import get_message_support
from mlxrun.api.text.tokens.tokens import tokenize
from mlxrun.core.request import Request, SamplingParams, TokenLogprob
from mlxrun.core.terminal import open_console
from mlxrun.core.workers import run_together
from mlxrun.evals.harnesses.local_engine import DEFAULT_NAME, LocalEngine, load_harness_config
from mlxrun.jobs.run.line_answerer import derive_line_seed

T = TypeVar("T")
Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, or None; ids of context and continuation


@register_model("mlxrun")
class LmEvalModel(TemplateLM):
    """A model of this process. `config`: a config file, `default`, or the path or hub id of a model;
    `pretrained`: another name for it; `settings`: values of the config by key, such as
    `scheduler.max_running=8`. `add_bos_token`: whether the tokenizer's special tokens stand before each text.
    None adds them if there is no chat template and the text does not begin with them."""

    def __init__(
        self,
        config: str | None = None,
        *,
        pretrained: str | None = None,
        add_bos_token: bool | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 1234,
        **settings: Any,
    ) -> None:
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):
            settings.pop(name, None)
        if config is not None and pretrained is not None:
            raise ValueError("give either config or pretrained: both name the model")
        loaded = load_harness_config(str(config or pretrained or DEFAULT_NAME), settings)
        self._engine = LocalEngine.open(loaded)
        self._config = self._engine.config
        self._model_info = model_info = self._engine.model_info
        self._formats = detect_formats(model_info.chat_template, model_info.tokenizer, self._config.parsers)
        loader = MediaLoader(self._config.media, None)
        self._context = ApiContext(model_info, self._config, loader, self._formats)
        self.tokenizer = model_info.tokenizer
        self.max_length = min(max_length or model_info.context_length, model_info.context_length)
        # The harness counts no token behind which none is predicted; to the engine all belong to the prompt.
        self._most_ids = min(self.max_length + 1, model_info.context_length)
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._seed = seed
        self._is_chat = False  # whether the texts were made by `apply_chat_template`

    # -- texts and tokens ---------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        found = self.tokenizer.bos_token_id
        return self.eot_token_id if found is None else int(found)

    @property
    def tokenizer_name(self) -> str:
        digests = self._model_info.digests
        return f"mlxrun-{digests['tokenizer'][:16]}-{digests['template'][:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template of the config or the model."""
        return self._model_info.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render the prompt of a chat as the server does. Without a generation prompt, the answer continues
        the last message."""
        self._is_chat = True
        chat = normalize_messages(chat_history, get_message_support(self._model_info))
        arguments = self._config.model.chat_template_args
        if add_generation_prompt:
            return render_chat(self._model_info, chat.messages, None, arguments)
        return render_continuation(self._model_info, chat.messages, None, arguments, "messages")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids. `add_special_tokens`: None means as `add_bos_token` says."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
        if add_special_tokens is None:
            add_special_tokens = not (self._is_chat or has_bos_prefix(string, self.tokenizer.bos_token))
        return list(tokenize(self._model_info, string, add_special_tokens=add_special_tokens).ids)

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness adds to its results."""
        return {
            "model_name": self._model_info.name,
            "model_digests": dict(self._model_info.digests),
            "mlxrun_version": __version__,
            "mlxrun_config": self._engine.digest,
        }

    # -- likelihoods --------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The logprob of each continuation, and whether each of its tokens is the likeliest."""
        scores = self._run(
            [partial(self._score, context, continuation) for _, context, continuation in requests],
            "loglikelihood",
            quiet=disable_tqdm,
        )
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the logprob (natural) of each text. A text that is longer than the context is computed in
        windows."""
        texts = [request.args[0] for request in requests]
        windows = [self._list_windows(text) for text in texts]
        scores = iter(self._loglikelihood_tokens([w for each in windows for w in each], disable_tqdm))
        sums = [math.fsum(next(scores)[0] for _ in each) for each in windows]
        for text, score in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return sums

    def _list_windows(self, text: str) -> list[Pair]:
        """Contexts and continuations that have each token of a text once."""
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._most_ids - 1,  # the first token of a window is its context
            context_len=1,
        )
        return [(None, *make_disjoint_window(window)) for window in windows]

    async def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = tuple(context + continuation)[-self._most_ids :]
        start = len(ids) - len(continuation)
        if start < 1:
            raise ValueError(f"{len(continuation)} tokens do not fit into max_length ({self.max_length})")
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        request = Request(secrets.token_hex(12), ids, params, logprobs_from=start)
        found: list[TokenLogprob | None] = []
        async with aclosing(self._engine.client.generate(request)) as events:
            async for event in events:
                found += event.prompt_logprobs
        scores = [score for score in found if score is not None]
        if len(scores) != len(continuation):
            raise RuntimeError(f"{len(scores)} logprobs for {len(continuation)} tokens")
        greedy = all(s.top[0][0] == token for s, token in zip(scores, continuation, strict=True))
        return math.fsum(score.logprob for score in scores), greedy

    # -- answers ------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answers, without reasoning if a chat template was applied."""
        pairs = [request.args for request in requests]
        answers = self._run(
            [partial(self._generate, at, text, options) for at, (text, options) in enumerate(pairs)],
            "generate_until",
            quiet=disable_tqdm,
        )
        for pair, answer in zip(pairs, answers, strict=True):
            self.cache_hook.add_partial("generate_until", pair, answer)
        return answers

    async def _generate(self, number: int, text: str, options: dict[str, Any]) -> str:
        """The answer to a prompt. Options that cannot be honoured are a RequestError that names them."""
        fields = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        stops = [stop for stop in fields.pop("until") if stop]
        most = fields.pop("max_gen_toks")
        del fields["do_sample"]  # the temperature says the same
        ids, most = maybe_truncate(self.tok_encode(text), most, self.max_length)
        reasons = self._is_chat and self._formats.get_reasoning_tags(text) is not None
        seed = derive_line_seed(self._seed, str(number))  # equal prompts have different answers
        body = {"prompt": ids, "max_tokens": most, "seed": seed, **fields}
        if not reasons:  # a stop string in the reasoning does not end the answer
            body["stop"] = stops[:MAX_STOPS]
        prepared = await prepare_request(COMPLETION_URL, body, self._context)
        if self._is_chat:
            prepared = replace(prepared, kind="chat", formats=self._formats, prompts=(text,))
        choice = Choice(prepared, 0, self._model_info)
        async with aclosing(self._engine.client.generate(prepared.requests[0])) as events:
            async for event in events:
                choice.feed(event)
                if choice.ended:
                    break
        return str(postprocess_generated_text(choice.content, stops, None))

    # -- running ------------------------------------------------------------------------------------------

    def _run(
        self, jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], label: str, *, quiet: bool
    ) -> list[T]:
        """The results of all jobs, as many at once as the engine's queue has places. The first error ends all
        and is raised."""
        slots = asyncio.Semaphore(self._config.scheduler.max_queue)
        with Progress(console=open_console(sys.stderr), disable=quiet) as progress:
            bar = progress.add_task(label, total=len(jobs))

            async def run(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
                async with slots:
                    result = await job()
                progress.advance(bar)
                return result

            future = self._engine.submit(run_together(map(run, jobs)))
            try:
                return future.result()
            finally:
                future.cancel()  # does nothing unless this thread was interrupted
