"""The fields of /v1/embeddings (OpenAI's) and /v1/rerank (as Jina, Cohere and vLLM have it)."""

from __future__ import annotations

from mlxrun.api.body_schema import ANY, BOOL, LIST, OBJECT, STRING, Accepted, BodySchema, Schema

EMBEDDING_URL, RERANK_URL = "/v1/embeddings", "/v1/rerank"
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
        "normalize": "the model's own files decide whether embeddings are normalised",
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
    },
    {"input": EMBEDDING_URL, "dimensions": EMBEDDING_URL, "encoding_format": EMBEDDING_URL},
    _IGNORED,
)
POOLED_BODIES: dict[str, BodySchema] = {EMBEDDING_URL: EMBEDDING, RERANK_URL: RERANK}
