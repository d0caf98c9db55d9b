"""/v1/embeddings and /v1/rerank of a running server, with tiny models of their own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrun.config.settings import Config, ModelSettings
from tests.helpers.pooling_models import QUERY, TEXTS, build_pooling_model
from tests.helpers.served_model import ModelServer, run_model_server

GOLDEN = json.loads((Path(__file__).parents[2] / "helpers" / "golden" / "embeddings.json").read_text())


def serve(folder: Path, name: str) -> Any:
    path = build_pooling_model(name, folder / name)
    return run_model_server(Config(model=ModelSettings(path=str(path))))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with serve(tmp_path_factory.mktemp("models"), "qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with serve(tmp_path_factory.mktemp("models"), "bert-reranker") as server:
        yield server


def call(server: ModelServer, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            raw = response.read()
            return response.status, json.loads(raw) if raw.startswith((b"{", b"[")) else raw.decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_embeddings_are_those_of_the_reference(embedder: ModelServer) -> None:
    status, body = call(embedder, "/v1/embeddings", {"input": list(TEXTS)})
    assert status == 200 and [item["index"] for item in body["data"]] == list(range(len(TEXTS)))
    assert np.abs(np.array([item["embedding"] for item in body["data"]]) - GOLDEN["qwen3"]).max() < 1e-4
    assert body["model"] == "qwen3" and body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 5


def test_ollamas_vectors_are_the_same(embedder: ModelServer) -> None:
    """They have the length 1, which this model's have anyway."""
    texts = list(TEXTS)
    expected = [item["embedding"] for item in call(embedder, "/v1/embeddings", {"input": texts})[1]["data"]]
    status, body = call(embedder, "/api/embed", {"model": "qwen3", "input": texts})
    assert status == 200 and body["embeddings"] == pytest.approx(np.array(expected), abs=1e-6)
    assert body["prompt_eval_count"] > 5 and body["total_duration"] > 0
    _, short = call(embedder, "/api/embed", {"model": "qwen3", "input": texts[0], "dimensions": 8})
    assert np.linalg.norm(short["embeddings"][0]) == pytest.approx(1) and len(short["embeddings"][0]) == 8
    _, old = call(embedder, "/api/embeddings", {"model": "qwen3", "prompt": texts[0]})
    assert old == {"embedding": expected[0]}
    assert call(embedder, "/api/embed", {"model": "m", "input": []})[1]["embeddings"] == []
    assert call(embedder, "/api/embeddings", {"model": "m"})[1] == {"embedding": []}
    assert call(embedder, "/api/show", {"model": "m"})[1]["capabilities"] == ["embedding"]


def test_a_prompt_by_its_name(embedder: ModelServer) -> None:
    _, body = call(embedder, "/v1/embeddings", {"input": QUERY, "prompt_name": "query"})
    assert np.abs(np.array(body["data"][0]["embedding"]) - GOLDEN["qwen3 query"][0]).max() < 1e-4


def test_many_texts_of_one_request(embedder: ModelServer) -> None:
    status, body = call(embedder, "/v1/embeddings", {"input": ["the cat sat", "a dog"] * 300})
    vectors = np.array([item["embedding"] for item in body["data"]])
    assert status == 200 and np.abs(vectors[::2] - vectors[0]).max() < 1e-5


def test_scores_are_sorted(reranker: ModelServer) -> None:
    body = {"query": QUERY, "documents": list(TEXTS), "top_n": 3}
    status, found = call(reranker, "/v1/rerank", body)
    assert status == 200
    order = sorted(range(len(TEXTS)), key=lambda at: -GOLDEN["bert-reranker"][at])[:3]
    assert [result["index"] for result in found["results"]] == order
    for result in found["results"]:
        assert abs(result["relevance_score"] - GOLDEN["bert-reranker"][result["index"]]) < 1e-4
        assert result["document"] == {"text": TEXTS[result["index"]]}


def test_every_path_gives_the_same_scores(reranker: ModelServer) -> None:
    body = {"query": QUERY, "documents": list(TEXTS)}
    _, expected = call(reranker, "/v1/rerank", body)
    scores = {result["index"]: result["relevance_score"] for result in expected["results"]}
    for path in ("/rerank", "/v2/rerank"):
        status, found = call(reranker, path, body)
        assert status == 200, path
        again = {result["index"]: result["relevance_score"] for result in found["results"]}
        assert again == pytest.approx(scores, abs=1e-6) and list(again) == list(scores)
        assert ("document" in found["results"][0]) == (path == "/rerank")
    for path in ("/v1/score", "/score"):
        status, found = call(reranker, path, {"text_1": QUERY, "text_2": list(TEXTS)})
        assert status == 200 and [each["index"] for each in found["data"]] == list(range(len(TEXTS)))
        assert {each["index"]: each["score"] for each in found["data"]} == pytest.approx(scores, abs=1e-6)


def test_what_the_model_does_not_do_is_a_400(embedder: ModelServer, reranker: ModelServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    for server, path, body in (
        (embedder, "/v1/chat/completions", chat),
        (embedder, "/v1/completions", {"prompt": "the"}),
        (embedder, "/v1/responses", {"input": "the"}),
        (embedder, "/v1/messages", {"model": "qwen3", **chat}),
        (embedder, "/v1/rerank", {"query": "a", "documents": ["b"]}),
        (embedder, "/v2/rerank", {"query": "a", "documents": ["b"]}),
        (embedder, "/score", {"text_1": "a", "text_2": "b"}),
        (reranker, "/v1/embeddings", {"input": "a"}),
        (reranker, "/v1/chat/completions", chat),
    ):
        status, found = call(server, path, body)
        assert status == 400 and "/v1/" in found["error"]["message"], (path, found)


def test_errors_name_the_field(embedder: ModelServer) -> None:
    status, body = call(embedder, "/v1/embeddings", {"input": ["the", "a " * 500]})
    assert (status, body["error"]["param"]) == (400, "input[1]")
    assert body["error"]["code"] == "context_length_exceeded"


def test_models_status_and_metrics_say_what_it_is(embedder: ModelServer, reranker: ModelServer) -> None:
    call(embedder, "/v1/embeddings", {"input": "the cat"})
    assert call(embedder, "/v1/models")[1]["data"][0]["tasks"] == ["embed"]
    assert call(reranker, "/v1/models")[1]["data"][0]["tasks"] == ["score"]
    status = call(embedder, "/v1/status")[1]
    assert status["model"]["tasks"] == ["embed"]
    metrics = call(embedder, "/metrics")[1]
    assert 'mlxrun_requests_total{status="200",surface="embeddings"}' in metrics
    assert "mlxrun_pooling_finished_total" in metrics and 'mlxrun_pooling{state="waiting"}' in metrics


def test_the_api_can_be_switched_off(tmp_path: Path) -> None:
    from mlxrun.config.settings import ApiSettings

    path = build_pooling_model("bert", tmp_path / "bert")
    config = Config(model=ModelSettings(path=str(path)), apis=ApiSettings(embeddings=False))
    with run_model_server(config) as server:
        status, body = call(server, "/v1/embeddings", {"input": "the"})
    assert status == 404 and "apis.embeddings: false" in body["error"]["message"]
