"""One test for each upstream name that mlxrun/model uses: what it is called, takes and holds.

They fail first when a library changes under us, and say which versions mlxrun was tested with.
"""

from __future__ import annotations

import importlib
import inspect
import io
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from packaging.requirements import Requirement

from mlxrun.model.hooks import attention
from mlxrun.model.machine.versions import find_version, read_requirements
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.model_fixtures import Zoo

LM, VLM = "mlx_lm.models.cache", "mlx_vlm.models.cache"
BOTH = pytest.mark.parametrize("library", [LM, VLM])


def versions(library: str) -> str:
    """What is installed, and what the package asks for."""
    name = library.split(".")[0].replace("_", "-")
    required = [Requirement(line) for line in read_requirements()]
    ranges = sorted({f"{r.name} {r.specifier}" for r in required if r.name == name})
    return f"{name} {find_version(name)} is installed; mlxrun was tested with {', '.join(ranges)}"


def need(fulfilled: bool, library: str, what: str) -> None:
    assert fulfilled, f"{what}: {versions(library)}"


def get(library: str, name: str) -> Any:
    module = importlib.import_module(library)
    need(name in vars(module), library, f"{library}.{name} is gone")
    return getattr(module, name)


# -- functions ----------------------------------------------------------------------------------------------

# What mlxrun passes by name; positional arguments are counted below.
CALLS = [
    ("mlx_lm.utils", "load_model", 1, ("lazy", "strict", "trust_remote_code")),
    ("mlx_lm.utils", "load_adapters", 2, ()),
    ("mlx_vlm.utils", "load_model", 1, ("lazy", "trust_remote_code")),
    ("mlx_vlm.utils", "apply_lora_layers", 2, ()),
    ("mlx_vlm.utils", "get_model_and_args", 1, ()),
    ("mlx_vlm.utils", "load_processor", 1, ("add_detokenizer", "trust_remote_code")),
    ("mlx_vlm.utils", "load_image_processor", 1, ()),
    ("mlx_vlm.utils", "prepare_inputs", 1, ("images", "prompts")),
    (LM, "make_prompt_cache", 1, ()),
    (VLM, "make_prompt_cache", 1, ()),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}.{call[1]}")
def test_functions_take_what_we_pass(call: tuple[str, str, int, tuple[str, ...]]) -> None:
    library, name, positional, keywords = call
    signature = inspect.signature(get(library, name))
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        need(False, library, f"{library}.{name}{signature}: {error}")


# The seam: these names and this order (queries, keys first) in both libraries.
@pytest.mark.parametrize("library", ["mlx_lm.models.base", "mlx_vlm.models.base"])
def test_the_attention_seam(library: str) -> None:
    given = list(inspect.signature(get(library, attention.ATTENTION_FUNCTION)).parameters)
    wanted = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    need(given == wanted, library, f"{attention.ATTENTION_FUNCTION} takes {given}, not {wanted}")


# -- caches -------------------------------------------------------------------------------------------------


def keys(*tokens: int) -> tuple[mx.array, mx.array]:
    """[1, 1, n, 2]: recognisable keys, and values that are their negatives."""
    x = mx.broadcast_to(mx.array(tokens, dtype=mx.float32)[None, None, :, None], (1, 1, len(tokens), 2))
    return x, -x


@BOTH
def test_kv_cache(library: str) -> None:
    cache = get(library, "KVCache")()
    need(cache.keys is None and cache.values is None and cache.offset == 0, library, "an empty KVCache")
    cache.update_and_fetch(*keys(1, 2, 3))
    need(type(cache.offset) is int and cache.offset == 3, library, "KVCache.offset counts tokens")
    need(cache.keys.shape[2] >= 3, library, "KVCache.keys [B, H, n, D]")
    need(cache.keys[0, 0, :3, 0].tolist() == [1, 2, 3], library, "KVCache.keys is oldest first")
    need(cache.values[0, 0, :3, 0].tolist() == [-1, -2, -3], library, "KVCache.values")
    need(cache.trim(1) == 1 and cache.offset == 2, library, "KVCache.trim drops the newest")
    roomy = get(library, "KVCache")()
    roomy.step = 512
    roomy.update_and_fetch(*keys(1, 2, 3))
    need(roomy.keys.shape[2] == 512, library, "KVCache.step: tokens that it grows by")
    cache.update_and_fetch(*keys(9))
    need(cache.keys[0, 0, :3, 0].tolist() == [1, 2, 9], library, "KVCache after trim")


@BOTH
def test_rotating_kv_cache(library: str) -> None:
    """`max_size` and `keep`; merge([one]) gives temporal order; trim before the ring has turned."""
    ring = get(library, "RotatingKVCache")(4)
    need(ring.max_size == 4 and ring.keep == 0, library, "RotatingKVCache(max_size).keep is 0")
    need(get(library, "RotatingKVCache")(4, keep=2).keep == 2, library, "RotatingKVCache(keep=)")
    ring.update_and_fetch(*keys(1, 2, 3))
    need(ring.trim(1) == 1 and ring.offset == 2, library, "RotatingKVCache.trim")
    ring.update_and_fetch(*keys(3, 4, 5, 6))
    for n in (7, 8, 9):
        ring.update_and_fetch(*keys(n))
    merged = type(ring).merge([ring])
    need(merged.keys[0, 0, :, 0].tolist() == [6, 7, 8, 9], library, "merge gives the newest, oldest first")
    need(merged.values[0, 0, :, 0].tolist() == [-6, -7, -8, -9], library, "merge of values")
    short = get(library, "RotatingKVCache")(4)
    short.update_and_fetch(*keys(1, 2))
    need(type(short).merge([short]).keys.shape[2] == 2, library, "merge of a ring that is not full")


@BOTH
def test_a_copied_cache_shares_nothing_that_changes(library: str) -> None:
    """Rows that share a forward are split off by copy.copy."""
    import copy

    for made in (get(library, "KVCache")(), get(library, "RotatingKVCache")(8)):
        made.update_and_fetch(*keys(1, 2, 3))
        other = copy.copy(made)
        other.update_and_fetch(*keys(4))
        need(made.offset == 3 and other.offset == 4, library, f"copy of {type(made).__name__}")
        need(made.keys[0, 0, :3, 0].tolist() == [1, 2, 3], library, "the original's keys")


@BOTH
def test_arrays_cache(library: str) -> None:
    cache = get(library, "ArraysCache")(2)
    need(cache.cache == [None, None], library, "ArraysCache(size).cache is a list of slots")
    cache[1] = mx.ones((1, 3))
    need(cache.cache[1] is cache[1], library, "ArraysCache items are its slots")
    cache.cache = [mx.zeros((2, 3)), mx.zeros((2, 3))]
    need(cache[0].shape == (2, 3), library, "ArraysCache.cache can be set")
    need(cache.left_padding is None and cache.lengths is None, library, "no padding by default")
    need(cache.make_mask(1) is None, library, "ArraysCache.make_mask without padding")


@BOTH
def test_cache_list(library: str) -> None:
    inner = get(library, "KVCache")(), get(library, "ArraysCache")(1)
    packed = get(library, "CacheList")(*inner)
    need(tuple(packed.caches) == inner, library, "CacheList.caches")
    need(packed[1] is inner[1], library, "CacheList items")


@BOTH
def test_states_hold_every_array(library: str) -> None:
    """`state` of a filled cache: what has to be evaluated after a chunk."""
    for made in (get(library, "KVCache")(), get(library, "RotatingKVCache")(8)):
        made.update_and_fetch(*keys(1, 2, 3))
        arrays = [a for a in made.state if isinstance(a, mx.array)]
        need(len(arrays) >= 2, library, f"{type(made).__name__}.state holds keys and values")


@pytest.mark.parametrize("family", text_models.CORE)
def test_caches_of_text_models(zoo: Zoo, family: str) -> None:
    names = {
        "llama": {"KVCache"},
        "gemma3_text": {"KVCache", "RotatingKVCache"},
        "gpt_oss": {"KVCache", "RotatingKVCache"},
        "qwen3_next": {"KVCache", "ArraysCache"},
        "mamba2": {"ArraysCache"},
    }[family]
    made = engine_driver.get_runner(
        engine_driver.make_real_engine(zoo.text(family), load_check=False)
    )._caller.make_cache()
    need({type(c).__name__ for c in made} == names, "mlx_lm", f"{family} uses {made}")
    need(isinstance(made, list), "mlx_lm", "make_prompt_cache gives a list")


# -- models -------------------------------------------------------------------------------------------------


def test_a_text_model_gives_logits(zoo: Zoo) -> None:
    from mlx_lm.utils import load_model

    model, config = load_model(zoo.text("llama"), lazy=True, strict=True, trust_remote_code=False)
    logits = model(mx.array([[1, 2, 3]]), cache=get(LM, "make_prompt_cache")(model))
    need(logits.shape == (1, 3, config["vocab_size"]), "mlx_lm", "model(ids, cache=) gives [B, n, V]")
    need(model.training is False or model.eval() is not None, "mlx_lm", "model.eval()")


def test_features_of_an_input_embedding() -> None:
    given = {f.name for f in fields(get("mlx_vlm.models.base", "InputEmbeddingsFeatures"))}
    used = {
        "inputs_embeds",
        "position_ids",
        "rope_deltas",
        "visual_pos_masks",
        "deepstack_visual_embeds",
        "per_layer_inputs",
        "cross_attention_states",
        "decoder_inputs_embeds",
        "pos_hw",
    }
    known = {"attention_mask_4d", "cross_attention_mask", "full_text_row_masked_out_mask", "attention_mask"}
    need(used <= given, "mlx_vlm", f"fields that are gone: {used - given}")
    need(given <= used | known, "mlx_vlm", f"fields that nobody passes on: {given - used - known}")


@pytest.mark.parametrize("family", vision_models.CORE)
def test_a_vision_model(zoo: Zoo, family: str) -> None:
    """get_input_embeddings(ids, pixels, mask=, ...), and a language model that takes what it gives."""
    engine = engine_driver.make_real_engine(zoo.vision(family), load_check=False)
    model = engine_driver.get_runner(engine)._caller.model
    (image,) = vision_models.images(1, 1)
    made = engine.model_info.process(vision_models.prompt(family, "a", None), [image])
    need("pixel_values" in made.media, "mlx_vlm", f"processor gives {sorted(made.media)}")
    need(all(isinstance(v, np.ndarray) for v in made.media.values()), "mlx_vlm", "media is numpy only")
    given = {key: mx.array(value) for key, value in made.media.items()}
    pixels = given.pop("pixel_values")
    ids = mx.array([made.ids])
    features = model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **given)
    need(features.inputs_embeds.shape[:2] == ids.shape, "mlx_vlm", "inputs_embeds [1, L, D]")
    if family == "qwen3_vl":
        need(features.position_ids.shape == (3, 1, ids.size), "mlx_vlm", "position_ids [3, 1, L]")
        need(features.rope_deltas.size == 1, "mlx_vlm", "one rope delta")
        visual = int(features.visual_pos_masks.sum())
        shapes = [d.shape[0] for d in features.deepstack_visual_embeds]
        need(shapes == [visual, visual], "mlx_vlm", "deepstack features [visual tokens, D], a list")
    wanted = {"inputs_embeds", "cache"} | ({"position_ids"} if family == "qwen3_vl" else set())
    names = inspect.signature(type(model.language_model).__call__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
    need(takes_any or wanted <= set(names), "mlx_vlm", f"{family}'s language model takes {list(names)}")
    out = model.language_model(mx.array([[1, 2]]), cache=get(VLM, "make_prompt_cache")(model.language_model))
    need(out.logits.shape[:2] == (1, 2), "mlx_vlm", "language_model(ids, cache=).logits")


# -- mlx ----------------------------------------------------------------------------------------------------

MLX: dict[str, Callable[[], bool]] = {
    "vmap over random keys samples each row with its own key": lambda: bool(
        mx.array_equal(
            mx.vmap(lambda key: mx.random.gumbel(shape=(4,), key=key))(mx.array([[0, 1], [2, 3]], mx.uint32))[
                1
            ],
            mx.random.gumbel(shape=(4,), key=mx.array([2, 3], mx.uint32)),
        )
    ),
    "put_along_axis undoes take_along_axis": lambda: (
        mx.put_along_axis(
            mx.zeros((1, 3)), mx.array([[2, 0, 1]]), mx.array([[5.0, 6.0, 7.0]]), axis=-1
        ).tolist()
        == [[6.0, 7.0, 5.0]]
    ),
    "argsort is ascending": lambda: mx.argsort(-mx.array([1.0, 3.0, 2.0])).tolist() == [1, 2, 0],
    "argmax takes the first of equals": lambda: int(mx.argmax(mx.array([1.0, 3.0, 3.0]))) == 1,
    "scatter-add counts doubles": lambda: mx.zeros(3).at[mx.array([1, 1])].add(1.0).tolist() == [0, 2, 0],
    "a copy is not changed by an update of the original": lambda: copied_before(),
    "memory is counted": lambda: mx.get_active_memory() > 0 and mx.get_peak_memory() > 0,
    "export_to_dot writes edges to a stream": lambda: dotted() == 2,
    "a bool mask is True where attention may look": lambda: masked(),
    "lazy arrays belong to their thread": lambda: crossed(),
    "softmax(precise=)": lambda: mx.softmax(mx.zeros((1, 2)), axis=-1, precise=True).tolist() == [[0.5, 0.5]],
    "streams can be cleared at a thread's end": lambda: callable(mx.clear_streams),
    "set_wired_limit": lambda: callable(mx.set_wired_limit) and callable(mx.metal.is_available),
}


def copied_before() -> bool:
    original = mx.zeros(3)
    view = original[0:2]
    original[0] = 5.0
    return bool(view.tolist() == [0, 0] and original.tolist() == [5, 0, 0])


def crossed() -> bool:
    """Whether a lazy array of another thread is refused, and an evaluated one taken."""
    made: list[mx.array] = []

    def work() -> None:
        made.extend([mx.zeros(2) + 1, mx.zeros(2) + 2])
        mx.eval(made[1])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="no Stream"):
        mx.eval(made[0])
    return bool((made[1] + 1).tolist() == [3, 3])


def dotted() -> int:
    text = io.StringIO()
    mx.export_to_dot(text, mx.exp(mx.array([1.0])))
    return text.getvalue().count("->")


def masked() -> bool:
    query, values = mx.ones((1, 1, 1, 2)), mx.array([1.0, 3.0])[None, None, :, None] * mx.ones((1, 1, 2, 2))
    mask = mx.array([False, True])[None, None, None]
    out = mx.fast.scaled_dot_product_attention(query, query * values, values, scale=1.0, mask=mask)
    return bool(mx.allclose(out, mx.full(out.shape, 3.0)))


@pytest.mark.parametrize("fact", MLX)
def test_mlx(fact: str) -> None:
    need(MLX[fact](), "mlx", fact)


def test_a_failure_names_the_tested_range() -> None:
    """What to install is part of the message."""
    said = r"something is gone: mlx-lm 0\.\S+ is installed; mlxrun was tested with mlx-lm [<>=.,0-9]+"
    with pytest.raises(AssertionError, match=said):
        need(False, "mlx_lm.models.cache", "something is gone")
