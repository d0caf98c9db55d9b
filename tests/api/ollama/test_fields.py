"""The fields of Ollama's bodies: what its documentation sends is accepted, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.ollama.fields import BODIES, CHAT_PATH, GENERATE_PATH, SAME_OPTIONS
from mlxrun.core.errors import RequestError

# Every option of the example in Ollama's docs/api.md.
DOCUMENTED = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 100,
    "draft_num_predict": 4,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "penalize_newline": True,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "use_mmap": True,
    "num_thread": 8,
}


@pytest.mark.parametrize("path", [CHAT_PATH, GENERATE_PATH])
def test_documented_options(path: str) -> None:
    """Those that have an effect are left; null counts as not given."""
    found = BODIES[path].check({"model": "m", "options": {**DOCUMENTED, "seed": None}})
    assert found["options"].keys() == {*SAME_OPTIONS, "num_predict"} - {"seed"}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT_PATH, {"options": {"typical_p": 0.7}}, ("options.typical_p", "only 1 is supported")),
        (CHAT_PATH, {"options": {"mirostat": 2}}, ("options.mirostat", "only 0 is supported")),
        (CHAT_PATH, {"options": {"temprature": 0}}, ("options.temprature", "did you mean 'temperature'?")),
        (CHAT_PATH, {"options": {"top_k": "x"}}, ("options.top_k", "expected integer, got string")),
        (CHAT_PATH, {"think": "hard"}, ("think", '"low"')),
        (CHAT_PATH, {"prompt": "x"}, ("prompt", "belongs to /api/generate")),
        (GENERATE_PATH, {"messages": []}, ("messages", "belongs to /api/chat")),
        (GENERATE_PATH, {"template": "{{ .Prompt }}"}, ("template", "model.chat_template")),
        (GENERATE_PATH, {"context": [1, 2]}, ("context", "/api/chat")),
        (GENERATE_PATH, {"width": 512}, ("width", "images are not generated")),
    ],
)
def test_what_would_change_the_answer_is_refused(path: str, fields: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        BODIES[path].check({"model": "m", **fields})
    assert caught.value.param == words[0] and all(word in str(caught.value) for word in words)


def test_strict_fields_refuse_options_without_effect() -> None:
    with pytest.raises(RequestError, match=r"options\.num_ctx"):
        BODIES[CHAT_PATH].check({"model": "m", "options": {"num_ctx": 1024}}, strict=True)
