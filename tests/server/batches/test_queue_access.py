"""Batches are seen by the key and through the API that they were made with."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.batches_server import ServerSetup, with_keys

PATHS = {"batch": "/v1/batches", "message_batch": "/v1/messages/batches"}
REQUEST = {"custom_id": "a", "params": {"max_tokens": 9, "messages": []}}


async def test_other_keys_and_the_other_api_see_nothing(tmp_path: Path) -> None:
    place = ServerSetup(tmp_path / "data", with_keys(alice="secret-a", bob="secret-b"), engine=False)
    place.headers = {"x-api-key": "secret-a"}
    async with place.run() as site:
        file = await site.upload(['{"id": "a", "prompt": "say a"}'])
        made = {"batch": (await site.create(file, endpoint="/v1/completions"))["id"]}
        reply = await site.send("POST", PATHS["message_batch"], json={"requests": [REQUEST]})
        made["message_batch"] = reply["id"]
    for secret, is_owner in (("secret-a", True), ("secret-b", False)):
        place.headers = {"x-api-key": secret}
        async with place.run() as site:
            for kind, path in PATHS.items():
                listed = [each["id"] for each in (await site.send("GET", path))["data"]]
                assert listed == ([made[kind]] if is_owner else [])
                for other, name in made.items():
                    found = await site.send("GET", f"{path}/{name}")
                    if is_owner and other == kind:
                        assert found["id"] == name
                    else:
                        words = "message batch" if kind == "message_batch" else "batch"
                        assert found["status_code"] == 404
                        assert found["error"]["message"].endswith(f"there is no {words} {name!r}")
