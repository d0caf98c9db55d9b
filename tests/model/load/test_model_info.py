"""What a model's folder says of itself, in the many ways in which folders say it.

Ends of answers, templates, context, recommended sampling and the kind of model, read from files of any age;
and that weights are loaded once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image

from benchmarks.tiny.byte_tokenizer import EOS, PAD, write_json
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import MediaError, ModelLoadError
from mlxrun.model.load.footprint import list_tensor_bytes
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_facts import DEFAULT_CONTEXT, list_tensor_names
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.model_fixtures import Zoo

Folder = Callable[..., Path]


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Folder:
    """A copy of a tiny model with other files: `config` and `generation` change keys, None takes one out."""

    def make(
        kind: str = "text",
        family: str = "llama",
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
    ) -> Path:
        made = tmp_path / f"{family} {len(list(tmp_path.iterdir()))}"
        shutil.copytree((zoo.text if kind == "text" else zoo.vision)(family), made)
        path = made / "config.json"
        new = json.loads(path.read_text()) | (config or {})
        write_json(path, {k: v for k, v in new.items() if v is not None})
        if generation is not None:
            write_json(made / "generation_config.json", generation)
        return made

    return make


def host(path: Path, **settings: Any) -> LoadedModelInfo:
    return load_model_info(ModelSettings(path=str(path), **settings))


# -- ends of answers ------------------------------------------------------------------------------------

ENDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, set[int]]] = {
    "the tokenizer's alone": ({"eos_token_id": None}, None, {EOS}),
    "a number in config.json": ({"eos_token_id": 7}, None, {EOS, 7}),
    "a list in config.json": ({"eos_token_id": [7, 8]}, None, {EOS, 7, 8}),
    "a list in generation_config.json": ({"eos_token_id": None}, {"eos_token_id": [9, PAD]}, {EOS, 9, PAD}),
    "all of them": ({"eos_token_id": 7}, {"eos_token_id": 9}, {EOS, 7, 9}),
    "of the text part": ({"eos_token_id": None, "text_config": {"eos_token_id": [11]}}, None, {EOS, 11}),
    "of the part of InternVL": ({"eos_token_id": None, "llm_config": {"eos_token_id": 12}}, None, {EOS, 12}),
}


@pytest.mark.parametrize("case", ENDS)
def test_every_file_may_name_an_end(folder: Folder, case: str) -> None:
    """What any of the model's files calls an end of an answer is one."""
    config, generation, wanted = ENDS[case]
    assert host(folder(config=config, generation=generation)).eos_ids == wanted


def test_an_end_from_a_list_ends_an_answer(zoo: Zoo, folder: Folder) -> None:
    """Not only read: the engine stops there. The twin: without the file the answer goes on."""
    ids = text_models.prompts(4, [12])[0]
    said = zoo.answer("llama", ids).tokens
    end = next(token for i, token in enumerate(said) if i > 3 and token not in said[:i])
    for generation, wanted in (({"eos_token_id": [1, end]}, said[: said.index(end)]), (None, said)):
        engine = engine_driver.make_real_engine(folder(generation=generation))
        request = engine_driver.make_text_request("a", ids, stop_ids=engine.model_info.eos_ids)
        assert engine_driver.run_requests(engine, [request])["a"].tokens == tuple(wanted)


# -- templates ------------------------------------------------------------------------------------------


def test_templates_of_old_and_new_folders(folder: Folder) -> None:
    """Beside the tokenizer, in its config, as a list of named ones, in chat_template.json, or none."""
    plain = folder()
    own = (plain / "chat_template.jinja").read_text()
    assert host(plain).chat_template == own
    (plain / "chat_template.jinja").unlink()
    assert host(plain).chat_template is None
    config = json.loads((plain / "tokenizer_config.json").read_text())
    write_json(plain / "tokenizer_config.json", config | {"chat_template": "in the config"})
    assert host(plain).chat_template == "in the config"
    named = [{"name": "default", "template": "the first"}, {"name": "rag", "template": "another"}]
    write_json(plain / "tokenizer_config.json", config | {"chat_template": named})
    assert host(plain).chat_template == "the first"
    write_json(plain / "chat_template.json", {"chat_template": "of a processor"})
    assert host(plain).chat_template == "of a processor"
    mine = plain / "mine.jinja"
    mine.write_text("of the user", encoding="utf-8")
    assert host(plain, chat_template=str(mine)).chat_template == "of the user"
    with pytest.raises(ModelLoadError, match=r"model\.chat_template"):
        host(plain, chat_template=str(plain / "missing.jinja"))


def test_a_template_that_is_none_is_named(folder: Folder) -> None:
    """The file, not only its folder. The twin: the same bytes in UTF-8."""
    made = folder()
    path = made / "chat_template.jinja"
    path.write_bytes("é {{ messages }}".encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: .*utf-8"):
        host(made)
    path.write_text("é {{ messages }}", encoding="utf-8")
    assert host(made).chat_template == "é {{ messages }}"
    for wrong in (7, ["a"], {"default": 3}):
        write_json(made / "chat_template.json", {"chat_template": wrong})
        with pytest.raises(
            ModelLoadError, match=r"chat_template\.json: chat_template must be a string or named strings"
        ):
            host(made)
    write_json(made / "chat_template.json", {"chat_template": {"default": "a", "rag": "b"}})
    assert host(made).chat_template == "a"


def test_a_processor_needs_no_template(folder: Folder) -> None:
    """Nothing beside the tokenizer inside the processor: text and its image are read the same."""
    path = folder("vision", "qwen3_vl")
    text, images = (
        vision_models.prompt("qwen3_vl", "what is ", None, "?"),
        vision_models.images(1, 1),
    )
    wanted = host(path).process(text, images)
    (path / "chat_template.jinja").unlink()
    made = host(path)
    assert made.chat_template is None and made.processor.tokenizer is not made.tokenizer
    read = made.process(text, images)
    assert (read.ids, read.image_spans) == (wanted.ids, wanted.image_spans) and len(read.image_spans) == 1


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_an_image_of_extreme_sides(folder: Folder, family: str) -> None:
    """The error is in our words: it goes to clients. Also where the library would enlarge such a line."""
    text = vision_models.prompt(family, "what is ", None, "?")
    with pytest.raises(MediaError, match="is 300 times as long as the other; it must be less than 200 times"):
        host(folder("vision", family)).process(text, [Image.new("RGB", (2, 600))])


# -- numbers ----------------------------------------------------------------------------------------------

CONTEXTS: dict[str, tuple[dict[str, Any], int]] = {
    "usual": ({"max_position_embeddings": 77}, 77),
    "old": ({"max_position_embeddings": None, "n_positions": 78}, 78),
    "other": ({"max_position_embeddings": None, "max_seq_len": 79}, 79),
    "the text part's goes first": (
        {"max_position_embeddings": 77, "text_config": {"max_position_embeddings": 80}},
        80,
    ),
    "InternVL's": ({"max_position_embeddings": None, "llm_config": {"max_position_embeddings": 81}}, 81),
    "DeepSeek's": (
        {"max_position_embeddings": None, "language_config": {"max_position_embeddings": 82}},
        82,
    ),
    "Qwen3-Omni's": (
        {
            "max_position_embeddings": None,
            "thinker_config": {"text_config": {"max_position_embeddings": 83}},
        },
        83,
    ),
    "a text part that is none": ({"text_config": "x"}, 4096),
    "none": ({"max_position_embeddings": None}, DEFAULT_CONTEXT),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_the_context_is_the_models_own(folder: Folder, case: str) -> None:
    """It bounds prompts; a config may say otherwise."""
    config, wanted = CONTEXTS[case]
    path = folder(config=config)
    assert host(path).context_length == wanted
    assert host(path, context_length=33).context_length == 33


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "wanted", "most"),
    [
        ({}, 78, 77),
        ({}, 77, None),
        ({}, None, None),
        ({"rope_scaling": YARN}, 256, None),
        ({"rope_scaling": YARN}, 257, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 78, 77),
        ({"max_position_embeddings": 50, "text_config": {"max_position_embeddings": 60}}, 61, 60),
        ({"max_position_embeddings": None}, 10**6, None),
    ],
)
def test_a_context_beyond_the_models_own_is_a_warning(
    folder: Folder, caplog: pytest.LogCaptureFixture, config: dict[str, Any], wanted: int | None, most: int
) -> None:
    path = folder(config={"max_position_embeddings": 77, **config})
    assert host(path, context_length=wanted).context_length == wanted or wanted is None
    found = [record.getMessage() for record in caplog.records if "context_length" in record.getMessage()]
    said = f"model.context_length is {wanted}, but the model's config allows {most} tokens"
    assert [message.startswith(said) for message in found] == [True] * (most is not None)


def test_recommended_sampling_is_the_default(folder: Folder) -> None:
    """Generation_config.json of the model; `do_sample: false` is greedy; what is no number is left."""
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    made = host(folder(generation={**recommended, "do_sample": True, "max_length": 9, "min_p": None}))
    assert made.defaults == recommended
    assert host(folder(generation={**recommended, "do_sample": False})).defaults == {"temperature": 0.0}
    assert host(folder()).defaults == {}


# -- the kind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_the_kind_follows_from_the_config(folder: Folder, family: str) -> None:
    """Vision_config makes a vision model, `kind: text` takes it for a text model all the same."""
    path = folder("vision", family)
    seen = host(path)
    assert seen.vision and seen.processor is not None
    read = host(path, kind="text")
    assert not read.vision and read.processor is None


def test_a_text_model_cannot_be_made_to_see(folder: Folder) -> None:
    """`kind: vision` is an error that names the setting and what is missing."""
    path = folder()
    assert not host(path).vision
    with pytest.raises(ModelLoadError, match=r"model\.kind: vision.*no vision_config"):
        host(path, kind="vision")


# -- weights ----------------------------------------------------------------------------------------------


def test_weights_in_mistrals_own_form_do_not_count(folder: Folder) -> None:
    """The library does not read them: they are the same weights once more, and may be missing."""
    path = folder()
    plain = host(path, kind="text")
    weights = mx.load(str(path / "model.safetensors"))
    mx.save_safetensors(str(path / "consolidated.safetensors"), {f"own.{k}": v for k, v in weights.items()})
    write_json(path / "consolidated.safetensors.index.json", {"weight_map": {"own.x": "consolidated-2"}})
    doubled = load_model_info(ModelSettings(path=str(path)), weights=True)
    assert list(list_tensor_bytes(doubled, 4)) == list(list_tensor_bytes(plain, 4))
    assert doubled.summary == plain.summary
    assert doubled.digests["model"] == plain.digests["model"]
    assert list_tensor_names(path) == weights.keys()
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"consolidated\* are not read: the model has no weights"):
        load_model_info(ModelSettings(path=str(path)), weights=True)


def test_a_link_to_weights_that_are_gone_is_named(folder: Folder) -> None:
    """As a cache whose blobs were removed has it."""
    path = folder()
    (path / "model-2.safetensors").symlink_to(path / "gone")
    with pytest.raises(ModelLoadError, match=r"llama.*FileNotFoundError.*model-2\.safetensors"):
        load_model_info(ModelSettings(path=str(path)), weights=True)


@pytest.mark.parametrize("value", [-1, {"a": 1}, True])
def test_a_value_that_nothing_can_be_made_of_names_the_folder(folder: Folder, value: Any) -> None:
    path = folder(config={"architectures": value})
    with pytest.raises(ModelLoadError, match=rf"^{path}: the model cannot be loaded: "):
        host(path)


def with_extra(path: Path, *names: str) -> Path:
    file = str(path / "model.safetensors")
    weights = mx.load(file)
    weights.update({name: mx.zeros((4, 4)) for name in names})
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    return path


def test_weights_of_other_parts_are_left_out(zoo: Zoo, folder: Folder) -> None:
    """Those of a drafting head, and of a tower where the text alone is wanted; answers are the same."""
    ids = text_models.prompts(5, [20])[0]
    plain = with_extra(folder("text", "qwen3_5"), "mtp.layers.0.mlp.weight", "vision_tower.blocks.0.weight")
    seeing = with_extra(
        folder("vision", "qwen3_vl"), "vision_tower.more.weight", "language_model.mtp.0.weight"
    )
    event = engine_driver.run_requests(
        engine_driver.make_real_engine(plain), [engine_driver.make_text_request("a", ids)]
    )["a"]
    engine_driver.check_answer(event, zoo.answer("qwen3_5", ids))
    event = engine_driver.run_requests(
        engine_driver.make_real_engine(seeing, kind="text"), [engine_driver.make_text_request("a", ids)]
    )["a"]
    engine_driver.check_answer(event, zoo.see("qwen3_vl", ids))


@pytest.mark.parametrize(("kind", "family"), [("text", "llama"), ("vision", "qwen3_vl")])
def test_weights_that_nobody_knows_are_named(folder: Folder, kind: str, family: str) -> None:
    """A checkpoint of another model is no half-right one; the error says what is too much."""
    with pytest.raises(ModelLoadError, match=r"(?s)not in model.*stranger\.weight"):
        engine_driver.make_real_engine(with_extra(folder(kind, family), "model.stranger.weight"))


@pytest.mark.parametrize(
    ("kind", "family", "read_as"),
    [
        ("text", "llama", "auto"),
        ("vision", "qwen3_vl", "auto"),
        ("vision", "qwen3_vl", "text"),
    ],
)
def test_weights_are_loaded_once(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, kind: str, family: str, read_as: Any
) -> None:
    """One load, and at no time more than 1.2 times the model in memory."""
    import mlx_lm.utils
    import mlx_vlm.utils

    calls: list[str] = []
    for library in (mlx_lm.utils, mlx_vlm.utils):
        real = library.load_model

        def spy(*given: Any, _real: Any = real, _name: str = library.__name__, **named: Any) -> Any:
            calls.append(_name)
            return _real(*given, **named)

        monkeypatch.setattr(library, "load_model", spy)
    path = (zoo.text if kind == "text" else zoo.vision)(family)
    made = host(path, kind=read_as)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caller = load_caller(Config(model=ModelSettings(path=str(path), kind=read_as)), made)
    active = mx.get_active_memory() - before
    assert calls == ["mlx_vlm.utils" if kind == "vision" and read_as == "auto" else "mlx_lm.utils"]
    assert active > 100_000
    assert mx.get_peak_memory() - before < 1.2 * active
    assert caller.make_cache()
