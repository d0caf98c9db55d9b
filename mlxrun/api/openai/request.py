"""Prepares bodies of OpenAI's chat/completions and completions: from JSON to Requests.

A field that would change the answer is honoured or refused: see body_schema.py. A refused body is a
RequestError whose `param` names the field. Slow work runs on worker threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from tokenizers import Tokenizer

from mlxrun.api.openai.fields import BODIES, URLS
from mlxrun.api.openai.pooled_texts import check_generates
from mlxrun.api.openai.reasoning import resolve_reasoning_fields
from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.prepared import ApiContext, PreparedRequest, RequestKind
from mlxrun.api.sampling_params import (
    build_sampling_params,
    choose_seed,
    compute_max_tokens,
    derive_choice_seed,
    read_chat_logprobs,
    read_prompt_logprobs,
    read_stop_strings,
)
from mlxrun.api.structured.response_format import (
    build_response_grammar,
    is_large_grammar,
    reject_structured_output,
)
from mlxrun.api.structured.schema_rewrites import close_body, close_tools
from mlxrun.api.structured.thinking_budget import ThinkingBudget, build_thinking_budget, read_thinking_budget
from mlxrun.api.text.continuation import CONTINUE_FINAL_MESSAGE, get_continued_path
from mlxrun.api.text.ignored_fields import log_ignored
from mlxrun.api.text.media.media_kinds import MediaRef, check_model_takes
from mlxrun.api.text.messages import Message, normalize_messages
from mlxrun.api.text.model_info import choose_adapter, name_model
from mlxrun.api.text.prompt import RenderedPrompt, build_chat_prompt, check_text
from mlxrun.api.text.raw_prompts import (
    MAX_CHOICES,
    WINDOWS,
    check_prompt_windows,
    mark_branches,
    prepare_raw_prompts,
    prepare_windows,
)
from mlxrun.api.text.templates.template import (
    find_template_variables,
    get_image_markers,
    require_template,
    select_template_variables,
    warn_unused_variables,
)
from mlxrun.api.text.templates.template_support import get_message_support
from mlxrun.api.text.tools import describe_tools_in_prompt, read_offered_tools
from mlxrun.core.field_errors import UNSUPPORTED, check_given, reject, reject_choice, reject_unsupported
from mlxrun.core.request import Grammar, LoraAdapter, Request, SamplingParams
from mlxrun.core.workers import GRAMMARS, IMAGES, run_on_text

_CONTROL_TOKEN = re.compile(r"<.*[|_\uff5c].*>")  # <|im_end|>, <end_of_turn>; not </s>, which is HTML too


async def prepare_request(
    url: str,
    body: Mapping[str, Any],
    context: ApiContext,
    *,
    default_max_tokens: int | None = None,
    stream: bool = False,
) -> PreparedRequest:
    """Check a body and build its Requests. `default_max_tokens`: where neither the body nor the config sets a
    maximum; `stream`: whether the caller can stream. RequestError if the body is refused."""
    kind = URLS.get(url)
    if kind is None:
        reject_choice("url", url, URLS)
    model_info, config = context.model_info, context.config
    given = await asyncio.to_thread(check_body, kind, body, context)
    adapter = choose_adapter(given.get("model"), model_info)
    _check_combinations(kind, given, context, stream)
    logprobs = read_chat_logprobs(given) if kind == "chat" else given.get("logprobs")
    params = build_sampling_params(given, model_info, config, logprobs)
    stops = read_stop_strings(given.get("stop"))
    seed = choose_seed(given, config)
    tools = read_offered_tools(given) if kind == "chat" else []
    prompts = await _prepare_prompts(kind, given, tools, context)
    formats = context.formats if kind == "chat" else ModelFormats()
    build = partial(_build_grammar, given, tools, prompts[0], context, formats)
    grammar = await (GRAMMARS.run(build) if is_large_grammar(given, tools) else asyncio.to_thread(build))
    lengths = [compute_max_tokens(given, len(p.ids), model_info, config, default_max_tokens) for p in prompts]
    per_prompt = [dataclasses.replace(params, max_tokens=length) for length in lengths]
    texts = tuple(prompt.text for prompt in prompts)
    backend = model_info.tokenizer.backend_tokenizer
    # A response format could contain the text of a stop token.
    is_free = grammar is None or (isinstance(grammar, ThinkingBudget) and grammar.inner is None)
    return PreparedRequest(
        kind=kind,
        requests=_build_requests(given, prompts, per_prompt, seed, grammar, adapter),
        stops=stops,
        seed=seed,
        model=name_model(model_info, adapter),
        n=int(given.get("n", 1)),
        control_stops=_find_control_stops(backend, params.stop_ids) if is_free else (),
        echoed_prompts=texts if given.get("echo") and WINDOWS not in given else (),
        echoed_offsets=tuple(prompt.offsets for prompt in prompts) if _has_echoed_logprobs(given) else (),
        prompt_logprobs=given.get("prompt_logprobs"),
        stream=bool(given.get("stream")),
        include_usage=bool(given.get("stream_options", {}).get("include_usage")),
        continuous_usage=bool(given.get("stream_options", {}).get("continuous_usage_stats")),
        returns_token_ids=bool(given.get("return_token_ids")),
        writes_tokens_as_ids=bool(given.get("return_tokens_as_token_ids")),
        formats=formats,
        tools=tuple(tools),
        single_tool_call=given.get("parallel_tool_calls") is False,
        prompts=texts if kind == "chat" else (),
        continuation=prompts[0].continuation,
        window_text=given["prompt"] if WINDOWS in given else None,
    )


def check_body(kind: RequestKind, body: Any, context: ApiContext) -> dict[str, Any]:
    """Return the fields of a body that have an effect. RequestError if a type or a range is wrong."""
    strict = context.config.server.strict_fields
    given = BODIES[kind].check(body, strict=strict)
    if "priority" in given and context.config.scheduler.policy != "priority":
        reason = "has no effect with this config; set scheduler.policy: priority"
        if strict:
            reject("priority", reason, code=UNSUPPORTED)
        log_ignored("priority", reason)
        del given["priority"]
    return resolve_reasoning_fields(given, context) if kind == "chat" else given


def _check_combinations(
    kind: RequestKind, given: Mapping[str, Any], context: ApiContext, stream: bool
) -> None:
    """Checks what depends on more than one field, on the model, or on the caller."""
    check_generates(context.model_info)
    if given.get("stream") and not stream:
        reject_unsupported("stream", "batches do not stream; leave it out")
    if "stream_options" in given and not given.get("stream"):
        reject("stream_options", 'needs "stream": true')
    if kind == "completion" and _has_echoed_logprobs(given) and given.get("suffix"):
        reject_unsupported("suffix", "not together with echo and logprobs")
    if "prompt_logprobs" in given and given.get("stream"):
        reject_unsupported("prompt_logprobs", "not in streams; use echo and logprobs of completions")
    check_given(given, "messages" if kind == "chat" else "prompt")
    if WINDOWS in given:
        check_prompt_windows(given)


def _has_echoed_logprobs(given: Mapping[str, Any]) -> bool:
    return bool(given.get("echo")) and "logprobs" in given and WINDOWS not in given


async def _prepare_prompts(
    kind: RequestKind, given: Mapping[str, Any], tools: Sequence[Message], context: ApiContext
) -> list[RenderedPrompt]:
    """The prompts of a request, of which each has `n` answers."""
    if kind == "chat":
        prompts = [await prepare_chat_prompt(given, tools, context, must_fit=True)]
    elif WINDOWS in given:
        prompts = await prepare_windows(given, context.model_info)
    else:
        prompts = await prepare_raw_prompts(
            given["prompt"],
            given.get("suffix", ""),
            context.model_info,
            offsets=_has_echoed_logprobs(given),
        )
        if read_prompt_logprobs(given) is not None:
            prompts = mark_branches(prompts)
    n = int(given.get("n", 1))
    if len(prompts) * n > MAX_CHOICES:
        reject("n", f"{len(prompts)} prompts with {n} choices are more than {MAX_CHOICES} answers")
    return prompts


def _build_grammar(
    given: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    prompt: RenderedPrompt,
    context: ApiContext,
    formats: ModelFormats,
) -> Grammar | None:
    """The grammar of the answer: its response format, and the limit of its reasoning."""
    budget = read_thinking_budget(given)
    if context.config.structured.close_objects:
        given, tools = close_body(given), close_tools(tools)
    arguments = {**context.config.model.chat_template_args, **given.get("chat_template_kwargs", {})}
    grammar = build_response_grammar(given, tools, prompt.text, context.model_info, formats, arguments)
    if budget is None:
        return grammar
    most, param = budget
    before = prompt.text.removesuffix(prompt.continuation)
    limited = build_thinking_budget(most, formats.reasoning, before, context.model_info, grammar, param=param)
    return dataclasses.replace(limited, continuation=prompt.continuation.encode())


def _build_requests(
    given: Mapping[str, Any],
    prompts: Sequence[RenderedPrompt],
    params: Sequence[SamplingParams],
    seed: int,
    grammar: Grammar | None,
    adapter: LoraAdapter | None,
) -> tuple[Request, ...]:
    """One Request per choice. All choices of a prompt share its tokens and its media."""
    name, n = secrets.token_hex(12), int(given.get("n", 1))
    return tuple(
        Request(
            id=f"{name}-{number * n + i}",
            prompt=prompt.ids,
            params=dataclasses.replace(params[number], seed=derive_choice_seed(seed, i)),
            image_spans=prompt.image_spans,
            media=prompt.media,
            image_digests=prompt.image_digests,
            cache_positions=prompt.cache_positions,
            priority=int(given.get("priority", 0)),
            speculation=given.get("speculation", True),
            sparse=given.get("sparse_prefill", True),
            fairness_key=str(given.get("user", "")),
            grammar=grammar,
            adapter=adapter,
            logprobs_from=prompt.logprobs_from,
        )
        for number, prompt in enumerate(prompts)
        for i in range(n)
    )


@lru_cache(maxsize=64)
def _find_control_stops(backend: Tokenizer, stop_ids: frozenset[int]) -> tuple[str, ...]:
    """Texts of stop tokens that can only be control tokens: a model that spells one out means to stop."""
    added = backend.get_added_tokens_decoder()
    texts = [added[i].content for i in sorted(stop_ids) if i in added and added[i].special]
    return tuple(text for text in texts if _CONTROL_TOKEN.fullmatch(text))


# Chat.


async def prepare_chat_prompt(
    given: Mapping[str, Any], tools: Sequence[Message], context: ApiContext, *, must_fit: bool = False
) -> RenderedPrompt:
    """Build the prompt of a checked chat body that offers `tools`, and load its images. `must_fit`: refuse a
    prompt that is certainly longer than the context, before it is tokenized."""
    continued_path = get_continued_path(given)
    if continued_path is not None:
        reason = f"not together with {CONTINUE_FINAL_MESSAGE}, as it applies to an answer from its beginning"
        reject_structured_output(given, tools, reason)
    model_info = context.model_info
    messages, refs, arguments, size = await asyncio.to_thread(_read_chat, given, context)
    continuation = str(messages[-1]["content"]) if continued_path is not None else ""
    template = require_template(model_info)
    if "tools" not in find_template_variables(template):
        native, call_format = "tool_calls" in template, context.formats.get_call_prefix_suffix("NAME")
        messages = await asyncio.to_thread(
            describe_tools_in_prompt, messages, tools, call_format, native=native
        )
        tools = ()
    messages, refs = await context.media_loader.open_documents(messages, refs, model_info)
    async with context.media_loader.load_images(refs, model_info) as images:
        work = partial(
            build_chat_prompt,
            *(model_info, messages, images, tools, arguments),
            refs=refs,
            continued_path=continued_path,
            must_fit=must_fit,
        )
        prompt = await (IMAGES.run(work) if images else run_on_text(size, work))
    return dataclasses.replace(prompt, continuation=continuation)


def _read_chat(
    given: Mapping[str, Any], context: ApiContext
) -> tuple[list[Message], tuple[MediaRef, ...], dict[str, Any], int]:
    """Messages, images and template variables, checked; and the number of characters of all of them."""
    configured, model_info = context.config.model.chat_template_args, context.model_info
    strict = context.config.server.strict_fields
    chat = normalize_messages(given["messages"], get_message_support(model_info), strict=strict)
    variables = dict(given.get("chat_template_kwargs", {}))
    if "thinking_budget" not in find_template_variables(require_template(model_info)):
        variables.pop("thinking_budget", None)  # read by api/structured/thinking_budget.py only
    variables = select_template_variables(model_info, variables, "chat_template_kwargs", strict=strict)
    warn_unused_variables(model_info, configured)
    check_model_takes(chat.images, model_info)
    markers = get_image_markers(model_info)
    markers.check_rendered(chat.images)
    fields = ("messages", "tools", "reasoning_effort", "chat_template_kwargs")
    size = sum(check_text(given.get(name), name, markers) for name in fields)
    return chat.messages, chat.images, {**configured, **variables}, size
