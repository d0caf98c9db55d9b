"""What `pip install mlxrun` brings serves text: mlx-vlm, OpenCV and what these need are extras."""

from __future__ import annotations

import json
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_processes import PATIENCE, run_serve

ROOT = Path(__file__).parents[2]
ABSENT = ("mlx_vlm", "cv2", "datasets", "pyarrow", "pandas", "mlx_audio", "fastapi", "uvicorn", "ray")
HIDE = f"sys.modules.update(dict.fromkeys({ABSENT}))"  # None: an import of it fails
IMAGE = "data:image/png;base64,AAAA"


def test_the_heavy_packages_are_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = " ".join(project["dependencies"])
    assert not any(name in plain for name in ("mlx-vlm", "opencv", "pyarrow", "datasets", "ray"))
    assert any("mlx-vlm" in each for each in project["optional-dependencies"]["vision"])


def ask(url: str, content: Any) -> tuple[int, str]:
    """The status, and the answer or the error's message."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/chat/completions", data, headers), timeout=PATIENCE
        ) as answer:
            return answer.status, json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


@pytest.mark.slow
def test_the_built_in_model_answers_text_and_says_what_images_need(tmp_path: Path) -> None:
    with run_serve(tmp_path, before=HIDE) as server:
        assert ask(server.url, "What is 12 + 30?") == (200, "42")
        status, message = ask(server.url, [{"type": "image_url", "image_url": {"url": IMAGE}}])
        assert status == 400 and "does not accept images: images need mlx-vlm" in message
        assert "pip install 'mlxrun[vision]'" in message
