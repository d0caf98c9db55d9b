"""OpenAI's chat/completions and completions: from a JSON body to Requests. Shared by the batch runner and
the server.

An accepted field is honoured or refused, never ignored; schemas.py lists all of them. A refused body is a
RequestError whose `param` names the field. Slow work (templates, tokens, pixels) runs on worker threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxrun.api.body_schema import check_tools
from mlxrun.api.choice import Choice
from mlxrun.api.context import ApiContext
from mlxrun.api.openai.fields import BODIES, URLS, RequestKind
from mlxrun.api.openai.response import build_error, build_response
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.sampling_params import (
    compute_max_tokens,
    read_chat_logprobs,
    derive_choice_seed,
    choose_seed,
    build_sampling_params,
    read_stop_strings,
)
from mlxrun.config.settings import Config
from mlxrun.errors import MediaError, NotFound
from mlxrun.parsers.model_formats import ModelFormats
from mlxrun.scheduler.request import Grammar, Request, SamplingParams
from mlxrun.structured.response_format import form_of, refuse_form
from mlxrun.structured.thinking_budget import ThinkingBudget, asked, budget_of
from mlxrun.text.continuation import CONTINUE_FINAL_MESSAGE, get_continued_path
from mlxrun.text.field_errors import (
    UNSUPPORTED,
    check_type,
    get_json_type,
    quote,
    reject,
    reject_unsupported,
    suggest,
)
from mlxrun.text.images import MediaLoader
from mlxrun.text.messages import ImageRef, Message, normalize_messages
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.prompt import RenderedPrompt, build_chat_prompt, build_raw_prompt, check_text
from mlxrun.text.template import check_template_arguments, get_image_markers, require_template
from mlxrun.text.template import find_template_variables as template_variables
from mlxrun.text.tools_prompt import describe_tools_in_prompt

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["URLS", "Choice", "PreparedRequest", "build_error", "prepare_request", "build_response"]

MAX_CHOICES = 2048
_CONTROL = re.compile(r"<.*[|_\uff5c].*>")  # <|im_end|>, <end_of_turn>; not </s>, which is HTML too


async def prepare_request(
    url: str,
    body: Mapping[str, Any],
    context: ApiContext,
    *,
    default_seed: int | None = None,
    default_max_tokens: int | None = None,
    stream: bool = False,
) -> PreparedRequest:
    """Checks a body and makes its prompts. The keywords are the caller's: what to use where neither body nor
    config says, and whether it can stream."""
    of = URLS.get(url)
    if of is None:
        reject("url", f"{quote(url)} is not one of {', '.join(URLS)}{suggest(str(url), URLS)}")
    host, config = context.model_info, context.config
    given = await asyncio.to_thread(BODIES[of].check, body)
    _check_fields(of, given, host, config, stream)
    logprobs = read_chat_logprobs(given) if of == "chat" else given.get("logprobs")
    params = build_sampling_params(given, host, config, logprobs)
    stops = read_stop_strings(given.get("stop"))
    seed = choose_seed(given, config, default_seed)
    tools: Sequence[Message] = ()
    if of == "chat":
        tools = read_offered_tools(given)
        prompts = [await prepare_chat_prompt(given, tools, context)]
    else:
        prompts = await asyncio.to_thread(_raw, given, host)
    n = int(given.get("n", 1))
    if len(prompts) * n > MAX_CHOICES:
        reject("n", f"{len(prompts)} prompts with {n} choices are more than {MAX_CHOICES} answers")
    formats = context.formats if of == "chat" else ModelFormats()
    grammar = await asyncio.to_thread(_grammar, given, tools, prompts[0], context, formats)
    lengths = [compute_max_tokens(given, len(p.ids), host, config, default_max_tokens) for p in prompts]
    per_prompt = [dataclasses.replace(params, max_tokens=length) for length in lengths]
    return PreparedRequest(
        kind=of,
        requests=_requests(given, prompts, per_prompt, seed, grammar),
        stops=stops,
        seed=seed,
        model=host.name,
        n=n,
        control_stops=_guards(host, params.stop_ids) if _says_anything(grammar) else (),
        echoed_prompts=tuple(p.text for p in prompts) if given.get("echo") else (),
        stream=bool(given.get("stream")),
        include_usage=bool(given.get("stream_options", {}).get("include_usage")),
        formats=formats,
        tools=tuple(tools),
        single_tool_call=given.get("parallel_tool_calls") is False,
        prompts=tuple(p.text for p in prompts) if of == "chat" else (),
        continuation=prompts[0].continuation,
    )


def check_model_name(name: str | None, host: ModelInfo) -> None:
    """Refuses a name that is not served. A config without names serves any: clients have theirs built in."""
    names = tuple(dict.fromkeys((host.name, *host.names)))
    if name is not None and host.names and name not in (*names, *host.aliases):
        text = f"model: {quote(name)} is not served here, but {', '.join(names)}"
        raise NotFound(text, param="model", code="model_not_found")


def _check_fields(of: RequestKind, given: dict[str, Any], host: ModelInfo, config: Config, stream: bool) -> None:
    """What depends on more than one field, on the model, or on the caller."""
    check_model_name(given.get("model"), host)
    if given.get("stream") and not stream:
        reject_unsupported("stream", "a batch has no streams; leave it out")
    if "stream_options" in given and not given.get("stream"):
        reject("stream_options", 'needs "stream": true')
    if "priority" in given and config.scheduler.policy != "priority":
        reason = "has no effect with this config; set scheduler.policy: priority"
        reject("priority", reason, code=UNSUPPORTED)
    if of == "completion" and given.get("echo") and "logprobs" in given:
        reject_unsupported("echo", "not together with logprobs, as prompts are not scored")
    required = "messages" if of == "chat" else "prompt"
    if required not in given:
        reject(required, "missing", code="missing_field")


def _grammar(
    given: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    prompt: RenderedPrompt,
    side: ApiContext,
    formats: ModelFormats,
) -> Grammar | None:
    """What the answer is held to: its form, and the length of its thought."""
    budget = asked(given)
    arguments = {**side.config.model.chat_template_args, **given.get("chat_template_kwargs", {})}
    form = form_of(given, tools, prompt.text, side.model_info, formats, arguments)
    if budget is None:
        return form
    most, param = budget
    begun = budget_of(most, formats.reasoning, prompt.text_before_continuation, side.model_info, form, param=param)
    return dataclasses.replace(begun, prefill=prompt.continuation.encode())


def _requests(
    given: Mapping[str, Any],
    prompts: Sequence[RenderedPrompt],
    params: Sequence[SamplingParams],
    seed: int,
    grammar: Grammar | None,
) -> tuple[Request, ...]:
    """One Request a choice. All choices of a prompt share its tokens and its media."""
    name, n = secrets.token_hex(12), int(given.get("n", 1))
    return tuple(
        Request(
            id=f"{name}-{at * n + i}",
            prompt=prompt.ids,
            params=dataclasses.replace(params[at], seed=derive_choice_seed(seed, i)),
            image_spans=prompt.spans,
            media=prompt.media,
            image_digests=prompt.digests,
            boundaries=prompt.boundaries,
            priority=int(given.get("priority", 0)),
            fairness_key=str(given.get("user", "")),
            grammar=grammar,
        )
        for at, prompt in enumerate(prompts)
        for i in range(n)
    )


def _says_anything(grammar: Grammar | None) -> bool:
    """Whether the answer has no form, in which a stop token's text may well stand."""
    return grammar is None or (isinstance(grammar, ThinkingBudget) and grammar.inner is None)


def _guards(host: ModelInfo, stop_ids: Iterable[int]) -> tuple[str, ...]:
    """Stop tokens whose text can only be a control token: a model that spells one out means to stop (A53)."""
    added = host.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    texts = [added[i].content for i in sorted(stop_ids) if i in added and added[i].special]
    return tuple(text for text in texts if _CONTROL.fullmatch(text))


# Chat.


async def prepare_chat_prompt(
    given: Mapping[str, Any], tools: Sequence[Message], side: ApiContext
) -> RenderedPrompt:
    """The prompt of a checked chat body in which `tools` are offered, as the engine gets it: images loaded,
    tokens in place."""
    open_at = get_continued_path(given)
    if open_at is not None:
        refuse_form(
            given,
            tools,
            f"not together with {CONTINUE_FINAL_MESSAGE}: a form holds from an answer's beginning on",
        )
    messages, refs, arguments = await asyncio.to_thread(_read_chat, given, side.model_info, side.config)
    prefill = str(messages[-1]["content"]) if open_at is not None else ""
    template = require_template(side.model_info)
    if "tools" not in template_variables(template):
        native, frame = "tool_calls" in template, side.formats.get_call_prefix_suffix("NAME")
        messages = await asyncio.to_thread(describe_tools_in_prompt, messages, tools, frame, native=native)
        tools = ()
    images = await _load(refs, side.model_info, side.config, side.media_loader)
    made = await asyncio.to_thread(build_chat_prompt, side.model_info, messages, images, tools, arguments, open_at)
    return dataclasses.replace(made, prefill=prefill)


def _read_chat(
    given: Mapping[str, Any], host: ModelInfo, config: Config
) -> tuple[list[Message], tuple[ImageRef, ...], dict[str, Any]]:
    """Messages, images and template variables, checked."""
    chat = normalize_messages(given["messages"])
    variables = dict(given.get("chat_template_kwargs", {}))
    if "thinking_budget" not in template_variables(require_template(host)):
        variables.pop("thinking_budget", None)  # then it is for us alone
    fields = {name: f"chat_template_kwargs.{name}" for name in variables}
    if "reasoning_effort" in given:
        variables = {**variables, "reasoning_effort": given["reasoning_effort"]}
        fields["reasoning_effort"] = "reasoning_effort"
    check_template_arguments(host, fields, config.model.chat_template_args)
    marks = get_image_markers(host)
    for name in ("messages", "tools", "chat_template_kwargs", "reasoning_effort"):
        check_text(given.get(name), name, marks)
    return chat.messages, chat.images, {**config.model.chat_template_args, **variables}


def read_offered_tools(given: Mapping[str, Any]) -> list[Message]:
    """The tools that the model is told of: none if it may not call any."""
    tools = check_tools(given.get("tools", []))
    return tools if given.get("tool_choice") != "none" else []


async def _load(
    refs: Sequence[ImageRef], host: ModelInfo, config: Config, loader: MediaLoader
) -> list[Image]:
    """All images at once; of several errors the first in the messages' order is raised."""
    if refs and not host.vision:
        reject(refs[0].param, f"the model {host.name!r} takes no images")
    most = config.media.max_images
    if len(refs) > most:
        raise MediaError(
            f"{refs[most].param}: {len(refs)} images are more than media.max_images ({most})",
            param=refs[most].param,
        )
    results = await asyncio.gather(*(loader.load(ref.url, ref.param) for ref in refs), return_exceptions=True)
    images = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        images.append(result)
    return images


# Completions.


def _raw(given: Mapping[str, Any], host: ModelInfo) -> list[RenderedPrompt]:
    return [build_raw_prompt(host, prompt, param) for prompt, param in _split(given["prompt"])]


def _split(prompt: Any) -> list[tuple[str | list[int], str]]:
    """A string, strings, token ids, or lists of token ids: each prompt with its path."""
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if not isinstance(prompt, list):
        reject("prompt", f"expected a string or an array, got {get_json_type(prompt)}", code="invalid_type")
    if not prompt:
        reject("prompt", "is empty; give at least one prompt")
    if type(prompt[0]) is int:
        return [(_ids(prompt, "prompt"), "prompt")]
    if len(prompt) > MAX_CHOICES:
        reject("prompt", f"has {len(prompt)} prompts; at most {MAX_CHOICES} are taken")
    if isinstance(prompt[0], str):
        return [(check_type(text, str, f"prompt[{i}]"), f"prompt[{i}]") for i, text in enumerate(prompt)]
    return [
        (_ids(check_type(ids, list, f"prompt[{i}]"), f"prompt[{i}]"), f"prompt[{i}]")
        for i, ids in enumerate(prompt)
    ]


def _ids(ids: list[Any], param: str) -> list[int]:
    for i, token in enumerate(ids):
        check_type(token, int, f"{param}[{i}]")
    return ids
