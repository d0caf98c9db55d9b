"""Reads the pairs of texts that get a score, and tokenizes texts as the model's own files say.

A text that the model cannot take is a RequestError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.prompt import check_text, check_token_ids
from mlxrun.api.text.templates.template import get_image_markers
from mlxrun.api.text.tokens.tokens import count_least_tokens
from mlxrun.core.errors import PromptTooLong, RequestError
from mlxrun.core.field_errors import (
    check_given,
    check_keys,
    check_type,
    get_required,
    reject,
    reject_choice,
    reject_type,
    reject_unsupported,
)
from mlxrun.core.request import PooledModel

MAX_TEXTS = 2048  # of a request, as in OpenAI's API
PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))  # names of vLLM

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # the model's own
_QWEN3 = (
    f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class PooledTokens(NamedTuple):
    """The token ids of a text or of a pair of texts, and their token types. Without types, all are 0."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


class TextPair(NamedTuple):
    """A query and a document, whose relevance for it is scored, with their places in the body."""

    query: str
    document: str
    query_param: str
    param: str


def read_rerank_pairs(given: Mapping[str, Any]) -> list[TextPair]:
    """Return the query of a body with each of its documents. RequestError if one is missing or wrong."""
    check_given(given, "query", "documents")
    documents = _read_texts(given, "documents")
    return [TextPair(given["query"], text, "query", param) for param, text in documents.items()]


def read_text_pairs(given: Mapping[str, Any]) -> list[TextPair]:
    """Return the pairs of a body: one text with each of many, or as many with as many. RequestError if it has
    none, or wrong ones."""
    found = [names for names in PAIR_NAMES if not given.keys().isdisjoint(names)]
    if len(found) > 1:
        second = next(name for name in found[1] if name in given)
        reject(second, f"not together with {' and '.join(found[0])}")
    first, second = found[0] if found else PAIR_NAMES[0]
    check_given(given, first, second)
    left, right = list(_read_texts(given, first).items()), list(_read_texts(given, second).items())
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        reject(second, f"has {len(right)} texts, and {first} has {len(left)}: give as many, or one {first}")
    pairs = zip(left, right, strict=True)
    return [TextPair(query, text, query_param, param) for (query_param, query), (param, text) in pairs]


def _read_texts(given: Mapping[str, Any], name: str) -> dict[str, str]:
    """The texts of a field by their places in it: a string, or an array of strings and of objects with only a
    `text`. RequestError for others."""
    value = given[name]
    if isinstance(value, str):
        return {name: value}
    if not isinstance(value, list):
        reject_type(name, value, "a string or an array")
    check_count(name, len(value))
    found = {}
    for at, item in enumerate(value):
        param = f"{name}[{at}]"
        if isinstance(item, dict):
            check_keys(item, ("text",), param)
            item = get_required(item, "text", str, param)
        elif not isinstance(item, str):
            reject_type(param, item, "a string or an object")
        found[param] = item
    return found


def find_pooled_model(model_info: ModelInfo, task: Literal["embed", "score"]) -> PooledModel:
    """Return how the model pools. RequestError if the model does not do this task."""
    found = model_info.pooled
    if found is not None and found.task == task:
        return found
    if task == "score":
        hint = " (a Qwen3-Reranker is one with model.kind: reranker in the config)"
        why = "is no reranker" + (": it gives embeddings (/v1/embeddings)" if found else hint)
    elif found is not None:
        why = "is a reranker, which gives scores (/v1/rerank)"
    elif model_info.speech is not None:
        why = "gives transcripts of sound (/v1/audio/transcriptions), and no embeddings"
    else:
        why = (
            "generates text, and gives no embeddings; an embedding model does, and this one if model.pooling "
            "is set in the config"
        )
    raise RequestError(f"model: {model_info.name!r} {why}", param="model", code="unsupported_model")


def check_generates(model_info: ModelInfo) -> None:
    """Raise RequestError if the model only gives embeddings, scores or transcripts."""
    found = model_info.pooled
    if not model_info.generates:
        what = "transcripts of sound (/v1/audio/transcriptions)"
        if found is not None:
            what = "embeddings (/v1/embeddings)" if found.task == "embed" else "scores (/v1/rerank)"
        text = f"model: {model_info.name!r} gives {what}, and generates no text"
        raise RequestError(text, param="model", code="unsupported_model")


def encode_inputs(given: Mapping[str, Any], model_info: ModelInfo) -> list[PooledTokens]:
    """Tokenize the field `input`: a text, a list of texts, a list of token ids, or a list of such lists."""
    pooled = find_pooled_model(model_info, "embed")
    value, most = given["input"], _read_most(given, pooled)
    texts: list[tuple[str, Any]]
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        texts = [("input", value)]
    else:
        check_count("input", len(value))
        texts = [(f"input[{at}]", each) for at, each in enumerate(value)]
    first = texts[0][1]
    if not isinstance(first, str | list):
        reject_type("input[0]", first, "a string or an array of token ids")
    expected = str if isinstance(first, str) else list
    for param, each in texts:
        check_type(each, expected, param)
    prompt = _find_prompt(given, pooled, has_text=expected is str)
    if expected is str:
        return [_encode_text(model_info, prompt + text, most, param) for param, text in texts]
    return [_check_ids(model_info, ids, most, param) for param, ids in texts]


def check_count(param: str, count: int) -> None:
    """Raise RequestError if there is no text, or more than MAX_TEXTS."""
    if not count:
        reject(param, "is empty; give at least one text")
    if count > MAX_TEXTS:
        reject(param, f"has {count} texts; at most {MAX_TEXTS} are allowed", code="invalid_value")


def encode_pairs(
    given: Mapping[str, Any], pairs: Sequence[TextPair], model_info: ModelInfo
) -> list[PooledTokens]:
    """Tokenize pairs of a query and a document. RequestError for a text that cannot be tokenized,
    PromptTooLong if a pair has too many tokens."""
    texts = {pair.query_param: pair.query for pair in pairs}
    if "instruction" in given:
        texts["instruction"] = given["instruction"]
    texts |= {pair.param: pair.document for pair in pairs}
    for text_param, text in texts.items():
        _check_pooled_text(text, text_param, model_info)
    pooled, instruction = find_pooled_model(model_info, "score"), given.get("instruction")
    if pooled.template is None and instruction is not None:
        reject_unsupported("instruction", "this reranker has none")
    found = []
    for query, document, _, param in pairs:
        if pooled.template == "qwen3":
            text = _QWEN3.format(instruction=instruction or _INSTRUCTION, query=query, document=document)
            tokens = _encode(model_info, text, None, special=False)
        else:
            tokens = _encode(model_info, query, document)
        if len(tokens.ids) > pooled.max_tokens:
            _raise_too_long(param, len(tokens.ids), pooled.max_tokens, "query and document have")
        found.append(tokens)
    return found


def _check_pooled_text(text: str, param: str, model_info: ModelInfo) -> None:
    """Raise RequestError for a text that cannot be tokenized, PromptTooLong if it is certainly too long."""
    check_text(text, param, get_image_markers(model_info))
    assert model_info.pooled is not None
    least, most = count_least_tokens(model_info.tokenizer, text), model_info.pooled.max_tokens
    if len(text) > most and least > most:
        _raise_too_long(param, least, most, "the text has at least")


def _find_prompt(given: Mapping[str, Any], pooled: PooledModel, *, has_text: bool) -> str:
    """The text that goes before each text; RequestError for a name that is none of the model's prompts."""
    name = given.get("prompt_name")
    if name is not None:
        if not pooled.prompts:
            reject_unsupported(
                "prompt_name", "the model's files have no prompts; put the text before each input"
            )
        if name not in pooled.prompts:
            reject_choice("prompt_name", name, pooled.prompts)
        if not has_text:
            reject("prompt_name", "goes with texts, not with token ids")
        return pooled.prompts[name]
    return "" if pooled.default_prompt is None else pooled.prompts[pooled.default_prompt]


def _read_most(given: Mapping[str, Any], pooled: PooledModel) -> int | None:
    """The number of tokens to which texts are cut; None: they are not."""
    most = given.get("truncate_prompt_tokens")
    if most == 0:
        reject("truncate_prompt_tokens", "0 leaves nothing of a text; give 1 or more, or -1")
    if most is None:
        return None
    return pooled.max_tokens if most == -1 else min(int(most), pooled.max_tokens)


def _encode_text(model_info: ModelInfo, text: str, most: int | None, param: str) -> PooledTokens:
    pooled = model_info.pooled
    assert pooled is not None
    if most is None:
        _check_pooled_text(text, param, model_info)
    else:
        check_text(text, param, get_image_markers(model_info))
    tokens = _encode(model_info, text.lower() if pooled.lower_case else text, most=most)
    if not tokens.ids:
        reject(param, "is empty; give at least one token")
    if len(tokens.ids) > pooled.max_tokens:
        _raise_too_long(param, len(tokens.ids), pooled.max_tokens, "the text has")
    return tokens


def _check_ids(model_info: ModelInfo, ids: list[int], most: int | None, param: str) -> PooledTokens:
    pooled = model_info.pooled
    assert pooled is not None
    if not ids:
        reject(param, "is empty; give at least one token")
    for at, token in enumerate(ids):
        check_type(token, int, f"{param}[{at}]")
    check_token_ids(model_info, ids, param)
    found = tuple(ids if most is None else ids[:most])
    if len(found) > pooled.max_tokens:
        _raise_too_long(param, len(found), pooled.max_tokens, "the text has")
    return PooledTokens(found)


def _encode(
    model_info: ModelInfo,
    text: str,
    pair: str | None = None,
    *,
    special: bool = True,
    most: int | None = None,
) -> PooledTokens:
    """Tokens with special ones around. Cut to `most`, the special tokens at either end stay."""
    tokenizer = model_info.tokenizer
    made = tokenizer(text, pair, add_special_tokens=special, return_special_tokens_mask=True, verbose=False)
    ids, mask = list(made["input_ids"]), list(made["special_tokens_mask"])
    types = list(made["token_type_ids"]) if "token_type_ids" in tokenizer.model_input_names else []
    if most is not None and len(ids) > most:
        last = next((at for at, is_special in enumerate(reversed(mask)) if not is_special), len(mask))
        keep = [*range(max(most - last, 0)), *range(len(ids) - min(last, most), len(ids))]
        ids, types = [ids[at] for at in keep], [types[at] for at in keep] if types else []
    return PooledTokens(tuple(ids), tuple(types))


def _raise_too_long(param: str, found: int, most: int, what: str) -> None:
    raise PromptTooLong(f"{param}: {what} {found} tokens; the model takes {most}", param=param)
