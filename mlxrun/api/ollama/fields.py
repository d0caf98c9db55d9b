"""The fields of Ollama's /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show.

Ranges are those of the chat endpoint, to whose fields the options are translated. The documentation is
docs/api.md of Ollama, and its types are api/types.go.
"""

from __future__ import annotations

from mlxrun.api.body_schema import (
    ANY,
    BOOL,
    LIST,
    OBJECT,
    STRING,
    TOOLS,
    Accepted,
    BodySchema,
    Schema,
    object_of,
)
from mlxrun.api.openai.fields import CHAT
from mlxrun.api.openai.foreign_fields import COMPLETION_IGNORED

CHAT_PATH, GENERATE_PATH, SHOW_PATH = "/api/chat", "/api/generate", "/api/show"
EMBED_PATH, OLD_EMBED_PATH = "/api/embed", "/api/embeddings"

# An option by the name of the same field of a chat body.
SAME_OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
_OPTIONS: Schema = object_of(
    {},
    {option: CHAT[name] for option, name in SAME_OPTIONS.items()}
    | {"num_predict": {"type": "integer", "minimum": -2}},
)
_INTEGER: Schema = {"type": "integer"}
_LOADING = "the config decides how the model is loaded"
_ALL_COUNT = "penalties count all tokens"
_IGNORED_OPTIONS: Accepted = {
    **{
        name: COMPLETION_IGNORED[name]
        for name in ("mirostat", "mirostat_eta", "mirostat_tau", "num_ctx", "tfs_z", "typical_p")
    },
    **dict.fromkeys(("num_batch", "num_gpu", "num_gqa", "main_gpu", "num_thread"), (_INTEGER, _LOADING)),
    **dict.fromkeys(("rope_frequency_base", "rope_frequency_scale"), ({"type": "number"}, _LOADING)),
    **dict.fromkeys(
        (
            *("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
            "embedding_only",
        ),
        (BOOL, _LOADING),
    ),
    "draft_num_predict": (_INTEGER, "speculation may make an answer faster, but never changes it"),
    "num_keep": (_INTEGER, "prompts are not cut"),
    "penalize_newline": (BOOL, _ALL_COUNT),
    "repeat_last_n": (_INTEGER, _ALL_COUNT),
}
_KEPT: Accepted = {"keep_alive": (ANY, "the model stays loaded")}
_HARMLESS: Accepted = _KEPT | {
    "shift": (BOOL, "an answer ends where the context is full"),
    "truncate": (BOOL, "a prompt that does not fit is refused, not cut"),
    "_debug_render_only": ({"const": False}, "it asks for nothing"),
}
_IGNORED: Accepted = {f"options.{name}": row for name, row in _IGNORED_OPTIONS.items()}
_COMMON: dict[str, Schema] = {
    "model": STRING,
    "stream": BOOL,
    "format": {"type": ["string", "object"]},
    "options": _OPTIONS,
    "think": {"enum": [True, False, "low", "medium", "high", "max"]},
    "logprobs": BOOL,
    "top_logprobs": CHAT["top_logprobs"],
}
CHAT_BODY = BodySchema(
    _COMMON | {"messages": LIST, "tools": TOOLS},
    _HARMLESS,
    elsewhere=dict.fromkeys(("prompt", "suffix", "system", "raw", "images", "template"), GENERATE_PATH),
    ignored=_IGNORED,
)
GENERATE_BODY = BodySchema(
    _COMMON
    | {
        "prompt": STRING,
        "suffix": STRING,
        "system": STRING,
        "images": LIST,  # whose items are checked where they are decoded
        "raw": BOOL,
    },
    _HARMLESS
    | {
        "template": ({"const": ""}, "set model.chat_template in the config"),
        "context": ({"const": []}, "answers have none; send the conversation as messages to /api/chat"),
    },
    dict.fromkeys(("width", "height", "steps"), "images are not generated"),
    dict.fromkeys(("messages", "tools"), CHAT_PATH),
    _IGNORED,
)
_UNREAD_OPTIONS: Accepted = {"options": (OBJECT, "embeddings have no options")}
EMBED_BODY = BodySchema(
    {
        "model": STRING,
        "input": {"type": ["string", "array"]},  # whose items are checked where they are tokenized
        "truncate": BOOL,
        "dimensions": {"type": "integer", "minimum": 0},
    },
    _KEPT | _UNREAD_OPTIONS,
    elsewhere={"prompt": OLD_EMBED_PATH},
)
OLD_EMBED_BODY = BodySchema(
    {"model": STRING, "prompt": STRING}, _KEPT | _UNREAD_OPTIONS, elsewhere={"input": EMBED_PATH}
)
SHOW_BODY = BodySchema(
    {"model": STRING, "name": STRING},
    {
        "verbose": (BOOL, "the tokens of the vocabulary are not listed"),
        **dict.fromkeys(("system", "template"), (STRING, "the model is shown as it is served")),
        "options": (OBJECT, "the model is shown as it is served"),
    },
)
BODIES: dict[str, BodySchema] = {
    CHAT_PATH: CHAT_BODY,
    GENERATE_PATH: GENERATE_BODY,
    EMBED_PATH: EMBED_BODY,
    OLD_EMBED_PATH: OLD_EMBED_BODY,
    SHOW_PATH: SHOW_BODY,
}
