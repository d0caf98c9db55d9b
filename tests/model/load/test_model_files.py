"""Where a model's files are."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.model.load.model_files import EMBEDDED, find_model_folder, read_json
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.model_fixtures import Zoo


def test_the_built_in_model_and_local_folders() -> None:
    assert find_model_folder(ModelSettings(path="embedded")) == EMBEDDED
    assert find_model_folder(ModelSettings(path=str(EMBEDDED))) == EMBEDDED


def test_a_folder_without_a_config_and_a_path_without_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no config.json"):
        find_model_folder(ModelSettings(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="there is no folder"):
        find_model_folder(ModelSettings(path=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="there is no folder none$"):
        find_model_folder(ModelSettings(path="none/"))
    with pytest.raises(ConfigError, match="there is no file m/none.gguf$"):
        find_model_folder(ModelSettings(path="m/none.gguf"))
    with pytest.raises(ConfigError, match=r"^model\.path: ~nobody-here/m: the home folder is unknown"):
        find_model_folder(ModelSettings(path="~nobody-here/m"))


def test_a_hub_id_that_cannot_be_fetched_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: object, **options: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match="neither a local folder nor a model on the hub: no network"):
        find_model_folder(ModelSettings(path="owner/name"))


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a draft model the error is one of the config."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("An error happened.\nGot: ConnectError: no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    said = "'owner/name' is neither a local folder nor a model in the local cache of the hub, and .*reached$"
    with pytest.raises(ModelLoadError, match=f"^model.path: {said}"):
        find_model_folder(ModelSettings(path="owner/name"))
    with pytest.raises(ConfigError, match=f"^model.draft: {said}"):
        load_model_info(ModelSettings(draft="owner/name"))


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_json(path) == {}
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    for wrong in ("[1]", "{", "\xff"):
        path.write_bytes(wrong.encode("latin-1"))
        with pytest.raises(ModelLoadError, match="a.json"):
            read_json(path)


@pytest.mark.parametrize(
    ("config", "said"), [("{}", "is missing"), ('{"model_type": 3}', "is 3"), ('{"model_type": ""}', "is ''")]
)
@pytest.mark.parametrize("kind", ["auto", "text", "vision", "embedding"])
def test_a_config_without_an_architecture(tmp_path: Path, config: str, said: str, kind: Any) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=rf"config\.json: model_type {said}; it must name"):
        load_model_info(ModelSettings(path=str(tmp_path), kind=kind))


def test_the_revision_goes_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id with its revision; without the weights where only the texts are needed."""
    received: list[Any] = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *given, **more: received.append((given, more)) or tmp_path
    )
    settings = ModelSettings(path="org/tiny", revision="v1.2")
    for weights in (True, False):
        assert find_model_folder(settings, weights) == tmp_path
    (first, with_weights), (_, without) = received
    assert first == ("org/tiny",) and with_weights["revision"] == without["revision"] == "v1.2"
    assert "*.safetensors" in with_weights["allow_patterns"]
    assert "*.safetensors" not in without["allow_patterns"]
    unread = with_weights["ignore_patterns"], without["ignore_patterns"]
    assert unread == ("consolidated*",) * 2, "the same weights once more"


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json"])
def test_a_small_file_that_is_a_pipe_is_not_opened(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """It would be waited for: this is in a thread that may be left behind."""
    folder = Path(shutil.copytree(zoo.vision("qwen2_5_vl"), tmp_path / "m"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    found: list[str] = []

    def load() -> None:
        try:
            load_model_info(ModelSettings(path=str(folder)))
        except ModelLoadError as error:
            found.append(str(error))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(60)
    assert found == [f"{folder / name}: it is a FIFO (named pipe), not a regular file"]
