"""Bodies of /v1/embeddings (OpenAI's), /v1/rerank and /v1/score, and their responses.

Rerank is as Jina, Cohere and vLLM have it, and score as vLLM has it.
A field that would change a vector is honoured or refused by name.
"""

from __future__ import annotations

import base64
import math
import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrun.api.body_schema import ANY, BOOL, LIST, OBJECT, STRING, Accepted, BodySchema, Schema
from mlxrun.api.openai.pooled_texts import (
    PAIR_NAMES,
    encode_inputs,
    encode_pairs,
    find_pooled_model,
    read_rerank_pairs,
    read_text_pairs,
)
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text.model_info import choose_adapter
from mlxrun.core.errors import InternalError
from mlxrun.core.field_errors import check_given, reject, reject_type, reject_unsupported
from mlxrun.core.request import PooledModel, Request, SamplingParams
from mlxrun.core.workers import run_on_text

EMBEDDING_URL, RERANK_URL, RELEVANCE_URL = "/v1/embeddings", "/v1/rerank", "/v1/score"
RERANK_V2_URL = "/v2/rerank"  # Cohere's second version: results have no documents unless they are asked for
POOLING_ALIASES = {"/rerank": RERANK_URL, "/score": RELEVANCE_URL}  # of vLLM
_COUNT: Schema = {"type": "integer", "minimum": 1}
_LABEL = "a label of the request"
_TRUNCATE = "send truncate_prompt_tokens: a number of tokens, or -1 for all that the model takes"

_HARMLESS: Accepted = {
    "user": (STRING, "it identifies the end user"),
    "add_special_tokens": ({"const": True}, "the tokenizer always adds its special tokens"),
}
_IGNORED: Accepted = {
    "metadata": (OBJECT, _LABEL),
    "safety_identifier": (STRING, _LABEL),
    "request_id": (STRING, "mlxrun assigns the ids"),
    "priority": ({"type": "integer"}, "texts are computed in the order of arrival, those of batches last"),
    "service_tier": (STRING, "there is only one service tier"),
}
EMBEDDING = BodySchema(
    {
        "model": STRING,
        "input": ANY,
        "dimensions": _COUNT,
        "encoding_format": {"enum": ["float", "base64"]},
        "prompt_name": STRING,
        "truncate_prompt_tokens": {"type": "integer", "minimum": -1},
    },
    _HARMLESS,
    {
        "normalize": "the model's own files decide whether embeddings are normalized",
        "task": "name one of the model's prompts with prompt_name",
        "input_type": "name one of the model's prompts with prompt_name",
        "truncate": _TRUNCATE,
        "messages": "send texts in input",
        "late_chunking": "each text is embedded by itself",
        "embedding_type": "use encoding_format",
        "output_dtype": "embeddings are float32",
        "output_dimension": "use dimensions",
        "softmax": "it is for classifiers",
    },
    {"query": RERANK_URL, "documents": RERANK_URL, "top_n": RERANK_URL, "return_documents": RERANK_URL},
    _IGNORED
    | {
        "late_chunking": ({"const": False}, "each text is embedded by itself"),
        "embed_dtype": ({"const": "float32"}, "embeddings are float32"),
        "endianness": ({"enum": ["native", "little"]}, "embeddings are little-endian"),
    },
)
RERANK = BodySchema(
    {
        "model": STRING,
        "query": STRING,
        "documents": LIST,  # whose items the endpoint checks, since there may be many
        "top_n": _COUNT,
        "return_documents": BOOL,
        "instruction": STRING,
    },
    _HARMLESS,
    {
        "max_chunks_per_doc": "a document that is too long is refused, not split",
        "max_tokens_per_doc": "a document that is too long is refused, not truncated",
        "truncate_prompt_tokens": "a document that is too long is refused, not truncated",
        "rank_fields": "send each document as one text",
        "activation": "the model's own files decide it",
        "use_activation": "the model's own files decide it",
    },
    {"input": EMBEDDING_URL, "dimensions": EMBEDDING_URL, "encoding_format": EMBEDDING_URL},
    _IGNORED,
)
RELEVANCE = BodySchema(
    {
        "model": STRING,
        **dict.fromkeys((name for pair in PAIR_NAMES for name in pair), ANY),
        "instruction": STRING,
    },
    _HARMLESS,
    {
        "truncate_prompt_tokens": "a text that is too long is refused, not truncated",
        "activation": "the model's own files decide it",
        "use_activation": "the model's own files decide it",
    },
    {"query": RERANK_URL, "top_n": RERANK_URL, "input": EMBEDDING_URL, "dimensions": EMBEDDING_URL},
    _IGNORED,
)
POOLED_BODIES: dict[str, BodySchema] = {
    EMBEDDING_URL: EMBEDDING,
    RERANK_URL: RERANK,
    RELEVANCE_URL: RELEVANCE,
}


@dataclass(frozen=True, slots=True)
class PreparedPooling:
    """A checked body. `prepared` has a Request for each text, or for each pair of texts."""

    url: str
    given: Mapping[str, Any]
    prepared: PreparedRequest
    pooled: PooledModel
    documents: tuple[str, ...] = ()

    def build(self, vectors: Sequence[bytes], name: str) -> dict[str, Any]:
        """Build the response. `vectors`: one per Request, as little-endian float32. `name`: makes the
        response's id. InternalError if a number is NaN or infinite, which JSON cannot express."""
        self._check_finite(vectors)
        tokens = self.prepared.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        if self.url == EMBEDDING_URL:
            data = [
                {"object": "embedding", "index": at, "embedding": self._write_vector(vector)}
                for at, vector in enumerate(vectors)
            ]
            return {"object": "list", "data": data, "model": self.prepared.model, "usage": usage}
        scores = [array("f", vector)[0] for vector in vectors]
        head = {"id": f"{self.url.rpartition('/')[2]}-{name}", "model": self.prepared.model}
        if self.url == RELEVANCE_URL:
            listed = [{"object": "score", "index": at, "score": value} for at, value in enumerate(scores)]
            return {**head, "object": "list", "created": int(time.time()), "data": listed, "usage": usage}
        order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
        results: list[dict[str, Any]] = [{"index": at, "relevance_score": scores[at]} for at in order]
        is_v2 = self.url == RERANK_V2_URL
        if self.given.get("return_documents", not is_v2):
            for result in results:
                result["document"] = {"text": self.documents[result["index"]]}
        results = results[: self.given.get("top_n")]
        meta = {"meta": {"api_version": {"version": "2"}}} if is_v2 else {}
        return {**head, "results": results, "usage": usage, **meta}

    def _check_finite(self, vectors: Sequence[bytes]) -> None:
        for at, vector in enumerate(vectors):
            if not np.isfinite(np.frombuffer(vector, "<f4")).all():
                names = {EMBEDDING_URL: "input", RELEVANCE_URL: "pairs"}
                field = names.get(self.url, "documents")
                cause = ArithmeticError("NaN or infinity")
                raise InternalError(f"{field}[{at}]: the model computes no finite numbers for it", cause)

    def _write_vector(self, vector: bytes) -> str | list[float]:
        size = self.given.get("dimensions", self.pooled.size)
        if size < self.pooled.size:
            vector = _shorten_vector(vector, size, self.pooled.normalized)
        if self.given.get("encoding_format") == "base64":
            return base64.b64encode(vector).decode()
        return array("f", vector).tolist()


def _shorten_vector(vector: bytes, size: int, normalized: bool) -> bytes:
    """The first `size` numbers, of length 1 again if the vector was."""
    numbers = array("f", vector)[:size]
    norm = math.sqrt(math.fsum(x * x for x in numbers)) if normalized else 1.0
    return array("f", [x / norm for x in numbers]).tobytes() if norm > 0 else numbers.tobytes()


async def prepare_pooling(url: str, body: Any, context: ApiContext) -> PreparedPooling:
    """Check a body and tokenize its texts. RequestError if the body is refused."""
    model_info = context.model_info
    given = check_pooling_body(url, body, strict=context.config.server.strict_fields)
    if choose_adapter(given.get("model"), model_info) is not None:
        reject_unsupported("model", "embeddings and scores are computed without adapters; set model.adapter")
    documents: tuple[str, ...] = ()
    if url == EMBEDDING_URL:
        pooled = find_pooled_model(model_info, "embed")
        _check_dimensions(given, pooled)
        value = given["input"]
        size = sum(
            len(each) for each in ([value] if isinstance(value, str) else value) if isinstance(each, str)
        )
        tokens = await run_on_text(size, encode_inputs, given, model_info)
    else:
        pooled = find_pooled_model(model_info, "score")
        pairs = read_text_pairs(given) if url == RELEVANCE_URL else read_rerank_pairs(given)
        documents = tuple(pair.document for pair in pairs)
        size = sum(len(pair.query) + len(pair.document) for pair in pairs)
        tokens = await run_on_text(size, encode_pairs, given, pairs, model_info)
    name, params = secrets.token_hex(12), SamplingParams(max_tokens=0)
    requests = tuple(
        Request(f"{name}-{at}", each.ids, params, pooled=True, token_types=each.types)
        for at, each in enumerate(tokens)
    )
    prepared = PreparedRequest("pooled", requests, stops=(), seed=0, model=model_info.name)
    return PreparedPooling(url, given, prepared, pooled, documents)


def check_pooling_body(url: str, body: Any, *, strict: bool = False) -> dict[str, Any]:
    """Return the fields of a body that have an effect. RequestError if one is wrong for every model."""
    given = POOLED_BODIES[RERANK_URL if url == RERANK_V2_URL else url].check(body, strict=strict)
    if url == EMBEDDING_URL:
        check_given(given, "input")
        if not isinstance(given["input"], str | list):
            reject_type("input", given["input"], "a string or an array")
    elif url == RELEVANCE_URL:
        read_text_pairs(given)
    else:
        read_rerank_pairs(given)
    return given


def _check_dimensions(given: Mapping[str, Any], pooled: PooledModel) -> None:
    size = given.get("dimensions", pooled.size)
    if size > pooled.size:
        reject("dimensions", f"{size} is more than the model's {pooled.size}", code="invalid_value")
    if pooled.sizes and size not in (*pooled.sizes, pooled.size):
        known = ", ".join(map(str, pooled.sizes))
        reject("dimensions", f"{size} is none of those that the model was trained for: {known}")
