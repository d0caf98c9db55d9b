"""Builds OpenAI's response objects from collected choices, and its error object from an exception.

The caller passes `id` and `created`; all else follows from the request and the tokens. vLLM's
`prompt_logprobs` are here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from mlxrun.api.choice import AnswerToken, Choice
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.text.tokens.detokenize import TokenBytes
from mlxrun.core.errors import InternalError, MlxrunError, RequestError, describe_error, get_http_status
from mlxrun.core.request import TokenLogprob

Json = dict[str, Any]


def build_response(
    prepared: PreparedRequest,
    choices: Sequence[Choice],
    request_id: str,
    created: int,
    fingerprint: str | None = None,
) -> Json:
    """Build the `chat.completion` or `text_completion` of a finished request. `created`: seconds since 1970.
    `fingerprint`: identifies the server's config; jobs have a manifest instead."""
    chat = prepared.kind == "chat"
    of_prompt: Json = {}  # that a chat has beside its choices
    if chat and prepared.returns_token_ids:
        of_prompt["prompt_token_ids"] = list(prepared.requests[0].prompt)
    if chat and prepared.prompt_logprobs is not None:
        of_prompt["prompt_logprobs"] = build_prompt_logprobs(prepared, choices[0])
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": prepared.model,
        "system_fingerprint": fingerprint,
        "choices": [_build_choice(prepared, choice) for choice in choices]
        if prepared.window_text is None
        else [_join_windows(prepared, choices)],
        "usage": build_usage(prepared, choices),
        **of_prompt,
        "mlxrun": {"seed": prepared.seed},
    }


def build_usage(prepared: PreparedRequest, choices: Sequence[Choice], prompt: int | None = None) -> Json:
    """Build OpenAI's `usage`, in tokens. A prompt counts once, with the cached tokens of its first choice.
    `prompt`: the number of the prompt's tokens; None: of all prompts."""
    prompt = prepared.prompt_tokens if prompt is None else prompt
    completion = sum(choice.completion_tokens for choice in choices)
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    firsts = [choice for choice in choices if choice.index % prepared.n == 0]
    left_out = sum(choice.left_out_tokens for choice in firsts)
    marks = {"left_out_tokens": left_out} if left_out else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts), **marks},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _build_choice(prepared: PreparedRequest, choice: Choice) -> Json:
    if prepared.kind == "chat":
        answer: Json = {"message": _build_message(choice)}
    else:
        prompts = prepared.echoed_prompts
        answer = {"text": (prompts[choice.index // prepared.n] if prompts else "") + choice.text}
    tokens = choice.get_tokens_with_logprobs()
    logprobs = build_logprobs(prepared, choice.index, tokens) if prepared.has_logprobs else None
    if prepared.echoed_offsets and logprobs is not None:
        echoed = build_echoed_logprobs(prepared, choice)
        logprobs = {name: values + logprobs[name] for name, values in echoed.items()}
    if prepared.prompt_logprobs is not None and prepared.kind == "completion":
        answer["prompt_logprobs"] = build_prompt_logprobs(prepared, choice)
    if prepared.returns_token_ids:
        answer |= build_prompt_ids(prepared, choice.index) | {"token_ids": list(choice.token_ids)}
    return {"index": choice.index, **answer, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _join_windows(prepared: PreparedRequest, choices: Sequence[Choice]) -> Json:
    """The choice of a text in windows: each of its tokens with its logprob, once."""
    tokens: list[str] = []
    logprobs: list[float] = []
    for choice in choices:
        request = prepared.requests[choice.index]
        name = partial(_name_token, choice.token_bytes, False)
        tokens += map(name, request.prompt[request.logprobs_from :])
        logprobs += [max(each.logprob, _LOWEST) for each in choice.prompt_logprobs if each is not None]
    if len(tokens) != len(logprobs):
        raise RuntimeError(f"{len(logprobs)} logprobs of {len(tokens)} tokens")
    found = {"tokens": tokens, "token_logprobs": logprobs}
    return {"index": 0, "text": prepared.window_text, "logprobs": found, "finish_reason": "length"}


def build_prompt_ids(prepared: PreparedRequest, index: int) -> Json:
    """Build the `prompt_token_ids` of a completion's choice. A chat has them beside its choices."""
    if prepared.kind == "chat":
        return {}
    return {"prompt_token_ids": list(prepared.requests[index].prompt)}


def _build_message(choice: Choice) -> Json:
    """OpenAI's message; reasoning is in `reasoning_content`, as in vLLM."""
    message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.calls
        ]
    return message


def build_logprobs(prepared: PreparedRequest, index: int, tokens: Sequence[AnswerToken]) -> Json:
    """Build the `logprobs` field of tokens of the answer with this index."""
    as_ids = prepared.writes_tokens_as_ids
    if prepared.kind == "chat":
        return build_chat_logprobs(tokens, as_ids=as_ids)
    start = len(prepared.echoed_prompts[index // prepared.n]) if prepared.echoed_prompts else 0
    return build_completion_logprobs(tokens, start, as_ids=as_ids)


def build_error(error: BaseException) -> Json:
    """Build OpenAI's error object. An error that is not meant for users shows only its class."""
    status = get_http_status(error)
    kinds = {403: "permission_error", 429: "rate_limit_error"}
    usual = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {
        "error": {
            "message": describe_error(error),
            "type": kinds.get(status, usual),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, MlxrunError) else "internal_error",
        }
    }


_TOKEN_ID = "token_id:"
_LOWEST = -9999.0  # OpenAI's value for a probability of zero, whose logarithm is not JSON


def build_chat_logprobs(tokens: Sequence[AnswerToken], *, as_ids: bool = False) -> Json:
    """Build the `logprobs` of a chat. `as_ids`: name tokens as vLLM does, `token_id:123`."""
    content = []
    for token in tokens:
        top = [
            _build_chat_token(text, logprob, token_id if as_ids else None)
            for (text, logprob), token_id in zip(token.top, token.top_ids, strict=True)
        ]
        own = _build_chat_token(token.text, token.logprob, token.id if as_ids else None)
        content.append(own | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _build_chat_token(text: bytes, logprob: float, token_id: int | None) -> Json:
    name = _format_bytes(text, mark="") if token_id is None else f"{_TOKEN_ID}{token_id}"
    return {"token": name, "logprob": max(logprob, _LOWEST), "bytes": list(text)}


def build_completion_logprobs(tokens: Sequence[AnswerToken], start: int = 0, *, as_ids: bool = False) -> Json:
    """Build the `logprobs` of a completion. `start`: the character of the choice's text where the answer
    begins."""

    def name(token: int, text: bytes) -> str:
        return f"{_TOKEN_ID}{token}" if as_ids else _format_bytes(text)

    tops = []
    for token in tokens:
        names = [name(i, text) for i, (text, _) in zip(token.top_ids, token.top, strict=True)]
        top = zip(names, (logprob for _, logprob in token.top), strict=True)
        tops.append(_build_top(top, name(token.id, token.text), token.logprob))
    return {
        "tokens": [name(token.id, token.text) for token in tokens],
        "token_logprobs": [max(token.logprob, _LOWEST) for token in tokens],
        "top_logprobs": tops,
        "text_offset": [start + token.offset for token in tokens],
    }


def _build_top(top: Iterable[tuple[str, float]], own: str, logprob: float) -> Json:
    """The likeliest tokens, and the token itself if it is none of them. Of two that have the same name, the
    likelier one is shown."""
    found: Json = {}
    for name, value in top:
        found.setdefault(name, value if value > _LOWEST else _LOWEST)
    found.setdefault(own, logprob if logprob > _LOWEST else _LOWEST)
    return found


def build_echoed_logprobs(prepared: PreparedRequest, choice: Choice) -> Json:
    """Build the `logprobs` of the prompt that a completion echoes. The prompt's first token has none."""
    request = prepared.requests[choice.index]
    name = partial(_name_token, choice.token_bytes, prepared.writes_tokens_as_ids)
    logprobs: list[float | None] = [None]
    tops: list[Json | None] = [None]
    for token, each in _pair_prompt(request.prompt, choice):
        if each is not None:  # a completion has no images
            logprobs.append(max(each.logprob, _LOWEST))
            top = [(name(i), value) for i, value in each.top[: request.params.logprobs]]
            tops.append(_build_top(top, name(token), each.logprob))
    return {
        "tokens": [name(token) for token in request.prompt],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": list(prepared.echoed_offsets[choice.index // prepared.n]),
    }


def build_prompt_logprobs(prepared: PreparedRequest, choice: Choice) -> list[Json | None]:
    """Build vLLM's `prompt_logprobs`. Each token of the prompt has itself and the likeliest tokens, by id.
    The first token and those of images have None. `rank` counts from 1."""
    prompt = prepared.requests[choice.index].prompt
    name = partial(_name_token, choice.token_bytes, False)
    found: list[Json | None] = [None]
    for token, each in _pair_prompt(prompt, choice):
        if each is None:
            found.append(None)
            continue
        top = each.top[: prepared.prompt_logprobs]
        described = {token: (each.logprob, each.rank or None)} | {
            i: (p, rank) for rank, (i, p) in enumerate(top, 1)
        }
        found.append(
            {
                str(i): {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": name(i)}
                for i, (logprob, rank) in described.items()
            }
        )
    return found


def _pair_prompt(prompt: Sequence[int], choice: Choice) -> Iterator[tuple[int, TokenLogprob | None]]:
    """The tokens of a prompt from the second on, each with its logprobs. InternalError if the engine did not
    return all of them."""
    found = choice.prompt_logprobs
    if len(found) != len(prompt) - 1:
        cause = ValueError(f"{len(found)} logprobs for a prompt of {len(prompt)} tokens")
        raise InternalError("the logprobs of the prompt are incomplete", cause)
    return zip(prompt[1:], found, strict=True)


@lru_cache(maxsize=1 << 18)  # prompts are long and share tokens
def _name_token(to_bytes: TokenBytes, as_ids: bool, token: int) -> str:
    return f"{_TOKEN_ID}{token}" if as_ids else _format_bytes(to_bytes(token))


def _format_bytes(text: bytes, mark: str = "bytes:") -> str:
    r"""A token as text; part of a character as OpenAI writes it: `\xe4\xbd`, after `mark`."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in text)
