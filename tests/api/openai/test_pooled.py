"""Bodies of /v1/embeddings and /v1/rerank, and what becomes of vectors."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.openai.pooled import PreparedPooling, check_pooling_body, prepare_pooling
from mlxrun.api.openai.pooled_texts import PAIR_NAMES, check_generates
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import InternalError, PromptTooLong, RequestError
from mlxrun.core.request import PooledModel
from mlxrun.core.transcription import SpeechModel
from tests.helpers.tokenizers import FakeModelInfo

EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
EMBEDDER = PooledModel("embed", 4, 12, prompts={"query": "q: ", "document": ""}, normalized=True)
SCORER = PooledModel("score", 1, 40)
MODEL = FakeModelInfo(pooled=EMBEDDER)
RERANKER = FakeModelInfo(pooled=SCORER)


def make(url: str, model: FakeModelInfo = MODEL, *, strict: bool = False, **body: Any) -> PreparedPooling:
    config = Config(server=ServerSettings(strict_fields=strict))

    async def run() -> PreparedPooling:
        return await prepare_pooling(url, body, ApiContext(model, config, MediaLoader(config.media, None)))

    return asyncio.run(run())


def embed(**body: Any) -> PreparedPooling:
    return make(EMBED, **{"input": "hi", **body})


def rank(model: FakeModelInfo = RERANKER, **body: Any) -> PreparedPooling:
    return make(RERANK, model, **{"query": "a", "documents": ["b", "c"], **body})


def refuse(call: Any, *given: Any, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*given, **body)
    return caught.value


def list_ids(pooling: PreparedPooling) -> list[list[int]]:
    return [list(request.prompt) for request in pooling.prepared.requests]


def test_a_model_that_transcribes_is_no_model_of_text() -> None:
    hears = FakeModelInfo(speech=SpeechModel(16_000, {}, 448))
    assert "gives transcripts of sound" in str(refuse(make, EMBED, hears, input="hi"))


def pack(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


def test_input_is_a_text_or_texts_or_token_ids() -> None:
    begin = 256 + 7  # of the byte tokenizer, behind its merges
    (ids,) = list_ids(embed(input="hi"))
    assert ids[0] >= begin - 7 and ids[1:] == [104, 105]
    assert list_ids(embed(input=["hi", "hi"])) == [ids, ids]
    assert list_ids(embed(input=[104, 105])) == [[104, 105]]
    assert list_ids(embed(input=[[104], [105, 106]])) == [[104], [105, 106]]
    requests = embed(input=["hi", "ho"]).prepared.requests
    assert all(request.pooled and request.params.max_tokens == 0 for request in requests)
    assert len({request.id for request in requests}) == 2


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_field"),
        ({"input": []}, "input", "invalid_request"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": ["a", 5]}, "input[1]", "invalid_type"),
        ({"input": [[1], "a"]}, "input[1]", "invalid_type"),
        ({"input": [1, "a"]}, "input[1]", "invalid_type"),
        ({"input": [[]]}, "input[0]", "invalid_request"),
        ({"input": [99999]}, "input[0]", "invalid_request"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a" * 40}, "input", "context_length_exceeded"),
        ({"input": [5] * 13}, "input", "context_length_exceeded"),
        ({"input": "\ud800"}, "input", "invalid_request"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimensions": 5}, "dimensions", "invalid_value"),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"prompt_name": "quarry"}, "prompt_name", "invalid_request"),
        ({"prompt_name": "query", "input": [1]}, "prompt_name", "invalid_request"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_request"),
        ({"normalize": True}, "normalize", "unsupported_parameter"),
        ({"task": "query"}, "task", "unsupported_parameter"),
        ({"late_chunking": True}, "late_chunking", "unsupported_parameter"),
        ({"query": "a"}, "query", "unknown_parameter"),
        ({"inputs": "a"}, "inputs", "unknown_parameter"),
    ],
    ids=str,
)
def test_bad_embedding_bodies_are_refused_by_name(body: dict[str, Any], param: str, code: str) -> None:
    error = refuse(embed, **body)
    assert (error.param, error.code) == (param, code)
    assert str(error).startswith(param)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"query": None}, "query", "missing_field"),
        ({"query": 5}, "query", "invalid_type"),
        ({"documents": []}, "documents", "invalid_request"),
        ({"documents": ["a"] * 2049}, "documents", "invalid_value"),
        ({"documents": ["a", 5]}, "documents[1]", "invalid_type"),
        ({"documents": [{"text": 5}]}, "documents[0].text", "invalid_type"),
        ({"documents": [{}]}, "documents[0].text", "missing_field"),
        ({"documents": [{"text": "a", "url": "b"}]}, "documents[0].url", "unknown_parameter"),
        ({"documents": ["a", "b" * 60]}, "documents[1]", "context_length_exceeded"),
        ({"documents": ["b" * 30], "query": "a" * 30}, "documents[0]", "context_length_exceeded"),
        ({"top_n": 0}, "top_n", "invalid_value"),
        ({"instruction": "judge"}, "instruction", "unsupported_parameter"),
        ({"max_chunks_per_doc": 3}, "max_chunks_per_doc", "unsupported_parameter"),
        ({"input": "a"}, "input", "unknown_parameter"),
    ],
    ids=str,
)
def test_bad_rerank_bodies_are_refused_by_name(body: dict[str, Any], param: str, code: str) -> None:
    error = refuse(rank, **body)
    assert (error.param, error.code) == (param, code)


def test_a_text_that_is_too_long_is_refused_or_cut() -> None:
    assert isinstance(refuse(embed, input="a" * 12), PromptTooLong)
    (ids,) = list_ids(embed(input="a" * 12, truncate_prompt_tokens=-1))
    assert len(ids) == 12 and ids[1:] == [97] * 11
    (ids,) = list_ids(embed(input="abcdef", truncate_prompt_tokens=3))
    assert ids[1:] == [97, 98]
    assert list_ids(embed(input=[1, 2, 3], truncate_prompt_tokens=2)) == [[1, 2]]


def test_prompts_are_the_models_own() -> None:
    with_prompt = list_ids(embed(input="hi", prompt_name="query"))
    assert with_prompt == list_ids(embed(input="q: hi"))
    default = FakeModelInfo(pooled=replace(EMBEDDER, default_prompt="query"))
    assert list_ids(make(EMBED, default, input="hi")) == with_prompt
    assert list_ids(make(EMBED, default, input="hi", prompt_name="document")) == list_ids(embed(input="hi"))
    none = FakeModelInfo(pooled=replace(EMBEDDER, prompts={}))
    assert refuse(make, EMBED, none, input="a", prompt_name="query").code == "unsupported_parameter"


def test_lower_case_where_the_model_wants_it() -> None:
    lower = FakeModelInfo(pooled=replace(EMBEDDER, lower_case=True))
    assert list_ids(make(EMBED, lower, input="HI")) == list_ids(embed(input="hi"))


def test_hints_have_no_effect() -> None:
    hints = {"user": "me", "priority": 3, "metadata": {"a": "b"}, "embed_dtype": "float32"}
    assert list_ids(embed(**hints)) == list_ids(embed())
    assert refuse(embed, strict=True, priority=3).param == "priority"


def test_the_response_has_numbers_or_base64() -> None:
    vectors = [pack(0.5, -0.5, 0.5, 0.5), pack(1, 0, 0, 0)]
    body = embed(input=["a", "bc"]).build(vectors, "x")
    assert body["object"] == "list" and body["model"] == "fake"
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert body["data"][0] == {"object": "embedding", "index": 0, "embedding": [0.5, -0.5, 0.5, 0.5]}
    coded = embed(input=["a", "b"], encoding_format="base64").build(vectors, "x")["data"][1]["embedding"]
    assert base64.b64decode(coded) == vectors[1]


def test_dimensions_cut_and_normalise_again() -> None:
    vector = pack(0.6, 0.0, 0.8, 0.0)
    found = embed(dimensions=3).build([vector], "x")["data"][0]["embedding"]
    assert found == pytest.approx([0.6, 0.0, 0.8])
    found = embed(dimensions=1).build([vector], "x")["data"][0]["embedding"]
    assert found == [1.0]
    plain = FakeModelInfo(pooled=replace(EMBEDDER, normalized=False))
    found = make(EMBED, plain, input="a", dimensions=1).build([vector], "x")["data"][0]["embedding"]
    assert math.isclose(found[0], 0.6, rel_tol=1e-6)
    assert embed(dimensions=2).build([pack(0, 0, 1, 0)], "x")["data"][0]["embedding"] == [0.0, 0.0]


def test_dimensions_are_those_that_the_model_was_trained_for() -> None:
    model = FakeModelInfo(pooled=replace(EMBEDDER, sizes=(2,)))
    make(EMBED, model, input="a", dimensions=2)
    make(EMBED, model, input="a", dimensions=4)
    assert refuse(make, EMBED, model, input="a", dimensions=3).param == "dimensions"


def test_scores_are_sorted_and_cut() -> None:
    documents = ["b", {"text": "c"}, "d"]
    vectors = [pack(0.25), pack(0.5), pack(0.25)]
    body = rank(documents=documents).build(vectors, "x")
    assert body["id"] == "rerank-x"
    assert body["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "c"}},
        {"index": 0, "relevance_score": 0.25, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.25, "document": {"text": "d"}},
    ]
    body = rank(documents=documents, top_n=1, return_documents=False).build(vectors, "x")
    assert body["results"] == [{"index": 1, "relevance_score": 0.5}]
    assert len(rank(documents=documents, top_n=9).build(vectors, "x")["results"]) == 3


@pytest.mark.parametrize(("first", "second"), PAIR_NAMES)
def test_pairs_of_texts_are_scored_in_their_order(first: str, second: str) -> None:
    """One text with many, many with as many, or one with one; under each of vLLM's names."""
    pairs: list[tuple[Any, Any, list[str]]] = [
        ("a", "b", ["ab"]),
        ("a", ["b", "c"], ["ab", "ac"]),
        (["a", "d"], ["b", "c"], ["ab", "dc"]),
        (["a"], [{"text": "b"}, "c"], ["ab", "ac"]),
    ]
    for left, right, expected in pairs:
        pooling = make(SCORE, RERANKER, **{first: left, second: right})
        same = [make(RERANK, RERANKER, query=pair[0], documents=[pair[1]]) for pair in expected]
        assert list_ids(pooling) == [ids for each in same for ids in list_ids(each)]
        vectors = [pack(float(at)) for at in range(len(expected))]
        body = pooling.build(vectors, "x")
        assert (body["id"], body["object"], body["model"]) == ("score-x", "list", pooling.prepared.model)
        assert body["data"] == [
            {"object": "score", "index": at, "score": float(at)} for at in range(len(expected))
        ]
        assert body["created"] > 1.7e9 and body["usage"]["total_tokens"] == pooling.prepared.prompt_tokens


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "text_1: missing"),
        ({"text_1": "a"}, "text_2: missing"),
        ({"documents": ["a"]}, "queries: missing"),
        ({"text_1": "a", "text_2": "b", "documents": "c"}, "documents: not together with text_1 and text_2"),
        (
            {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
            "text_2: has 3 texts, and text_1 has 2: give as many, or one text_1",
        ),
        ({"text_1": "a", "text_2": []}, "text_2: is empty; give at least one text"),
        ({"text_1": "a", "text_2": 5}, "text_2: expected a string or an array, got integer"),
        ({"text_1": ["a"], "text_2": ["b", 5]}, "text_2[1]: expected a string or an object, got integer"),
        ({"text_1": "a", "text_2": "b" * 100}, "text_2: "),
        ({"query": "a", "documents": ["b"]}, "query: "),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens: "),
    ],
)
def test_wrong_pairs_are_refused(body: dict[str, Any], said: str) -> None:
    assert str(refuse(make, SCORE, RERANKER, **body)).startswith(said)


def test_the_second_version_of_rerank() -> None:
    """Results have no documents unless they are asked for, and the answer names the version."""
    body = {"query": "a", "documents": ["b", "c"]}
    found = make("/v2/rerank", RERANKER, **body).build([pack(0.5), pack(0.75)], "x")
    assert found["results"] == [{"index": 1, "relevance_score": 0.75}, {"index": 0, "relevance_score": 0.5}]
    assert found["meta"] == {"api_version": {"version": "2"}} and found["id"] == "rerank-x"
    found = make("/v2/rerank", RERANKER, **body, return_documents=True, top_n=1).build(
        [pack(1), pack(0)], "x"
    )
    assert found["results"] == [{"index": 0, "relevance_score": 1.0, "document": {"text": "b"}}]
    assert refuse(make, "/v2/rerank", RERANKER, query="a").param == "documents"


def test_qwen3_rerankers_have_a_template_and_an_instruction() -> None:
    model = FakeModelInfo(pooled=replace(SCORER, max_tokens=1000, template="qwen3"))
    default, other = (rank(model, instruction=text) for text in (None, "Find birds"))
    texts = [model.tokenizer.decode(list_ids(each)[1]) for each in (default, other)]
    assert "<Query>: a\n<Document>: c<|im_end|>" in texts[0]
    assert "Given a web search query" in texts[0] and "<Instruct>: Find birds\n" in texts[1]
    assert texts[0].endswith("assistant\n<think>\n\n</think>\n\n")


def test_a_model_is_asked_only_for_what_it_gives() -> None:
    chat = FakeModelInfo()
    for url, model, said in (
        (EMBED, chat, "model.pooling"),
        (EMBED, RERANKER, "/v1/rerank"),
        (RERANK, MODEL, "/v1/embeddings"),
        (RERANK, chat, "no reranker (a Qwen3-Reranker is one with model.kind: reranker"),
    ):
        error = refuse(
            make, url, model, **({"input": "a"} if url == EMBED else {"query": "a", "documents": ["b"]})
        )
        assert (error.param, error.code) == ("model", "unsupported_model") and said in str(error)
    check_generates(chat)
    check_generates(FakeModelInfo(pooled=replace(EMBEDDER, generates=True)))
    assert "generates no text" in str(refuse(check_generates, MODEL))


@pytest.mark.parametrize(
    ("url", "body", "said"),
    [
        (EMBED, {"input": 5}, "input: expected a string or an array, got integer"),
        (EMBED, {"input": [{}]}, "input[0]: expected a string or an array of token ids, got object"),
        (
            RERANK,
            {"query": "a", "documents": [5]},
            "documents[0]: expected a string or an object, got integer",
        ),
    ],
)
def test_errors_name_all_types_that_are_allowed(url: str, body: dict[str, Any], said: str) -> None:
    model = RERANKER if url == RERANK else MODEL
    assert str(refuse(make, url, model, **body)) == said


def test_bodies_are_checked_without_a_model() -> None:
    check_pooling_body(EMBED, {"input": [1, 2]})
    check_pooling_body(RERANK, {"query": "a", "documents": ["b"]})
    assert refuse(check_pooling_body, EMBED, {"input": {}}).param == "input"
    assert refuse(check_pooling_body, RERANK, {"query": "a", "documents": [3]}).param == "documents[0]"


def test_the_commands_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "embeddings.md").read_text(encoding="utf-8")
    bodies = re.findall(r"^curl http://\S+(/v1/\w+) .* -d '(.*)'$", page, re.MULTILINE)
    assert [url for url, _ in bodies] == [EMBED, EMBED, RERANK, SCORE]
    for url, body in bodies:
        model = replace(EMBEDDER if url == EMBED else SCORER, max_tokens=100)
        make(url, FakeModelInfo(pooled=model), **json.loads(body))


def test_numbers_that_json_does_not_have_are_an_error() -> None:
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(InternalError, match=r"^input\[1\]: the model computes no finite numbers"):
            embed(input=["a", "b"]).build([pack(1, 2, 3, 4), pack(1, number, 3, 4)], "x")
        with pytest.raises(InternalError, match=r"^documents\[0\]: "):
            rank().build([pack(number), pack(1)], "x")
        with pytest.raises(InternalError, match=r"^pairs\[0\]: "):
            make(SCORE, RERANKER, text_1="a", text_2="b").build([pack(number)], "x")
