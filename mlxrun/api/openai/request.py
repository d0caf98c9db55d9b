"""Prepares bodies of OpenAI's chat/completions and completions: from JSON to Requests.

Used by the batch runner and by all surfaces of the server. A field is honoured or refused, never ignored: see
fields.py. A refused body is a RequestError whose `param` names the field. Slow work runs on worker threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxrun.api.body_schema import check_tools
from mlxrun.api.context import ApiContext
from mlxrun.api.openai.fields import BODIES, URLS
from mlxrun.api.prepared import PreparedRequest, RequestKind
from mlxrun.api.sampling_params import (
    build_sampling_params,
    choose_seed,
    compute_max_tokens,
    derive_choice_seed,
    read_chat_logprobs,
    read_stop_strings,
)
from mlxrun.errors import MediaError, NotFound
from mlxrun.parsers.model_formats import ModelFormats
from mlxrun.scheduler.request import Grammar, Request, SamplingParams
from mlxrun.structured.response_format import build_response_grammar, reject_structured_output
from mlxrun.structured.thinking_budget import ThinkingBudget, build_thinking_budget, read_thinking_budget
from mlxrun.text.continuation import CONTINUE_FINAL_MESSAGE, get_continued_path
from mlxrun.text.field_errors import (
    UNSUPPORTED,
    check_type,
    get_json_type,
    quote,
    reject,
    reject_choice,
    reject_unsupported,
)
from mlxrun.text.messages import ImageRef, Message, normalize_messages
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.prompt import RenderedPrompt, build_chat_prompt, build_raw_prompt, check_text
from mlxrun.text.template import (
    check_template_arguments,
    find_template_variables,
    get_image_markers,
    require_template,
)
from mlxrun.text.tools_prompt import describe_tools_in_prompt

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CHOICES = 2048
_CONTROL_TOKEN = re.compile(r"<.*[|_\uff5c].*>")  # <|im_end|>, <end_of_turn>; not </s>, which is HTML too


async def prepare_request(
    url: str,
    body: Mapping[str, Any],
    context: ApiContext,
    *,
    default_seed: int | None = None,
    default_max_tokens: int | None = None,
    stream: bool = False,
) -> PreparedRequest:
    """Checks a body and builds its prompts. The keywords are the caller's: defaults for what neither the body
    nor the config sets, and whether the caller can stream."""
    kind = URLS.get(url)
    if kind is None:
        reject_choice("url", url, URLS)
    model_info, config = context.model_info, context.config
    given = await asyncio.to_thread(BODIES[kind].check, body)
    _check_combinations(kind, given, context, stream)
    logprobs = read_chat_logprobs(given) if kind == "chat" else given.get("logprobs")
    params = build_sampling_params(given, model_info, config, logprobs)
    stops = read_stop_strings(given.get("stop"))
    seed = choose_seed(given, config, default_seed)
    tools = read_offered_tools(given) if kind == "chat" else []
    if kind == "chat":
        prompts = [await prepare_chat_prompt(given, tools, context)]
    else:
        prompts = await asyncio.to_thread(_build_raw_prompts, given["prompt"], model_info)
    n = int(given.get("n", 1))
    if len(prompts) * n > MAX_CHOICES:
        reject("n", f"{len(prompts)} prompts with {n} choices are more than {MAX_CHOICES} answers")
    formats = context.formats if kind == "chat" else ModelFormats()
    grammar = await asyncio.to_thread(_build_grammar, given, tools, prompts[0], context, formats)
    lengths = [compute_max_tokens(given, len(p.ids), model_info, config, default_max_tokens) for p in prompts]
    per_prompt = [dataclasses.replace(params, max_tokens=length) for length in lengths]
    texts = tuple(prompt.text for prompt in prompts)
    return PreparedRequest(
        kind=kind,
        requests=_build_requests(given, prompts, per_prompt, seed, grammar),
        stops=stops,
        seed=seed,
        model=model_info.name,
        n=n,
        control_stops=_get_control_stops(model_info, params.stop_ids) if _is_free_text(grammar) else (),
        echoed_prompts=texts if given.get("echo") else (),
        stream=bool(given.get("stream")),
        include_usage=bool(given.get("stream_options", {}).get("include_usage")),
        formats=formats,
        tools=tuple(tools),
        single_tool_call=given.get("parallel_tool_calls") is False,
        prompts=texts if kind == "chat" else (),
        continuation=prompts[0].continuation,
    )


def check_model_name(name: str | None, model_info: ModelInfo) -> None:
    """Refuses a name that is not served. A config without names serves any: clients have theirs built in."""
    names = tuple(dict.fromkeys((model_info.name, *model_info.names)))
    if name is not None and model_info.names and name not in (*names, *model_info.aliases):
        text = f"model: {quote(name)} is not served here; the names are {', '.join(names)}"
        raise NotFound(text, param="model", code="model_not_found")


def _check_combinations(
    kind: RequestKind, given: Mapping[str, Any], context: ApiContext, stream: bool
) -> None:
    """Checks what depends on more than one field, on the model, or on the caller."""
    check_model_name(given.get("model"), context.model_info)
    if given.get("stream") and not stream:
        reject_unsupported("stream", "batches do not stream; leave it out")
    if "stream_options" in given and not given.get("stream"):
        reject("stream_options", 'needs "stream": true')
    if "priority" in given and context.config.scheduler.policy != "priority":
        reason = "has no effect with this config; set scheduler.policy: priority"
        reject("priority", reason, code=UNSUPPORTED)
    if kind == "completion" and given.get("echo") and "logprobs" in given:
        reject_unsupported("echo", "not together with logprobs, as logprobs of prompts are not computed")
    required = "messages" if kind == "chat" else "prompt"
    if required not in given:
        reject(required, "missing", code="missing_field")


def _build_grammar(
    given: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    prompt: RenderedPrompt,
    context: ApiContext,
    formats: ModelFormats,
) -> Grammar | None:
    """The grammar of the answer: its response format, and the limit of its reasoning."""
    budget = read_thinking_budget(given)
    arguments = {**context.config.model.chat_template_args, **given.get("chat_template_kwargs", {})}
    grammar = build_response_grammar(given, tools, prompt.text, context.model_info, formats, arguments)
    if budget is None:
        return grammar
    most, param = budget
    before = prompt.text_before_continuation
    limited = build_thinking_budget(most, formats.reasoning, before, context.model_info, grammar, param=param)
    return dataclasses.replace(limited, continuation=prompt.continuation.encode())


def _build_requests(
    given: Mapping[str, Any],
    prompts: Sequence[RenderedPrompt],
    params: Sequence[SamplingParams],
    seed: int,
    grammar: Grammar | None,
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
            boundaries=prompt.boundaries,
            priority=int(given.get("priority", 0)),
            fairness_key=str(given.get("user", "")),
            grammar=grammar,
        )
        for number, prompt in enumerate(prompts)
        for i in range(n)
    )


def _is_free_text(grammar: Grammar | None) -> bool:
    """Whether the answer has no response format, which could contain the text of a stop token."""
    return grammar is None or (isinstance(grammar, ThinkingBudget) and grammar.inner is None)


def _get_control_stops(model_info: ModelInfo, stop_ids: Iterable[int]) -> tuple[str, ...]:
    """Texts of stop tokens that can only be control tokens: a model that spells one out means to stop."""
    added = model_info.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    texts = [added[i].content for i in sorted(stop_ids) if i in added and added[i].special]
    return tuple(text for text in texts if _CONTROL_TOKEN.fullmatch(text))


# Chat.


async def prepare_chat_prompt(
    given: Mapping[str, Any], tools: Sequence[Message], context: ApiContext
) -> RenderedPrompt:
    """The prompt of a checked chat body that offers `tools`, with its images loaded."""
    continued_path = get_continued_path(given)
    if continued_path is not None:
        reason = f"not together with {CONTINUE_FINAL_MESSAGE}, as it applies to an answer from its beginning"
        reject_structured_output(given, tools, reason)
    model_info = context.model_info
    messages, refs, arguments = await asyncio.to_thread(_read_chat, given, context)
    continuation = str(messages[-1]["content"]) if continued_path is not None else ""
    template = require_template(model_info)
    if "tools" not in find_template_variables(template):
        native, call_format = "tool_calls" in template, context.formats.get_call_prefix_suffix("NAME")
        messages = await asyncio.to_thread(
            describe_tools_in_prompt, messages, tools, call_format, native=native
        )
        tools = ()
    images = await _load_images(refs, context)
    prompt = await asyncio.to_thread(
        build_chat_prompt, model_info, messages, images, tools, arguments, continued_path
    )
    return dataclasses.replace(prompt, continuation=continuation)


def _read_chat(
    given: Mapping[str, Any], context: ApiContext
) -> tuple[list[Message], tuple[ImageRef, ...], dict[str, Any]]:
    """Messages, images and template variables, checked."""
    chat = normalize_messages(given["messages"])
    configured, model_info = context.config.model.chat_template_args, context.model_info
    variables = dict(given.get("chat_template_kwargs", {}))
    if "thinking_budget" not in find_template_variables(require_template(model_info)):
        variables.pop("thinking_budget", None)  # read by structured/thinking_budget.py only
    fields = {name: f"chat_template_kwargs.{name}" for name in variables}
    if "reasoning_effort" in given:
        variables["reasoning_effort"] = given["reasoning_effort"]
        fields["reasoning_effort"] = "reasoning_effort"
    check_template_arguments(model_info, fields, configured)
    markers = get_image_markers(model_info)
    for name in ("messages", "tools", "chat_template_kwargs", "reasoning_effort"):
        check_text(given.get(name), name, markers)
    return chat.messages, chat.images, {**configured, **variables}


def read_offered_tools(given: Mapping[str, Any]) -> list[Message]:
    """The tools that the model may call: none if `tool_choice` is none."""
    tools = check_tools(given.get("tools", []))
    return tools if given.get("tool_choice") != "none" else []


async def _load_images(refs: Sequence[ImageRef], context: ApiContext) -> list[Image]:
    """Loads all images at once; of several errors the first in the order of messages is raised."""
    if refs and not context.model_info.vision:
        reject(refs[0].param, f"the model {context.model_info.name!r} does not accept images")
    most = context.config.media.max_images
    if len(refs) > most:
        param = refs[most].param
        raise MediaError(f"{param}: {len(refs)} images are more than media.max_images ({most})", param=param)
    loads = (context.media_loader.load(ref.url, ref.param) for ref in refs)
    images = []
    for result in await asyncio.gather(*loads, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        images.append(result)
    return images


# Completions.


def _build_raw_prompts(prompt: Any, model_info: ModelInfo) -> list[RenderedPrompt]:
    """The prompts of a string, strings, token ids, or lists of token ids."""
    if isinstance(prompt, list) and not prompt:
        reject("prompt", "is empty; give at least one prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and type(prompt[0]) is int):
        prompts = [("prompt", prompt)]
    elif isinstance(prompt, list):
        if len(prompt) > MAX_CHOICES:
            reject("prompt", f"has {len(prompt)} prompts; at most {MAX_CHOICES} are allowed")
        expected = str if isinstance(prompt[0], str) else list
        prompts = [(f"prompt[{i}]", each) for i, each in enumerate(prompt)]
        for param, each in prompts:
            check_type(each, expected, param)
    else:
        found = get_json_type(prompt)
        reject("prompt", f"expected a string or an array, got {found}", code="invalid_type")
    for param, each in prompts:
        for i, token in enumerate(each if isinstance(each, list) else ()):
            check_type(token, int, f"{param}[{i}]")
    return [build_raw_prompt(model_info, each, param) for param, each in prompts]
