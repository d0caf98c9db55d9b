"""The tiny models and the ORACLE are fit for what other tests conclude from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.tiny import byte_tokenizer
from tests.helpers import oracle, text_models, vision_models
from tests.helpers.model_fixtures import Zoo, mark_sweep

pytestmark = pytest.mark.thorough

TEXT = mark_sweep(text_models.TEXT, (*text_models.CORE, "deepseek_v3", "gemma2", "gemma4_text"))
VISION = mark_sweep(vision_models.VISION, vision_models.CORE)


@pytest.mark.parametrize("family", TEXT)
def test_text_model_says_varied_printable_things(zoo: Zoo, family: str) -> None:
    (prompt,) = text_models.prompts(7, [29])
    answer = zoo.answer(family, prompt)
    assert len(set(answer.tokens)) >= 6
    assert all(token == 10 or 32 <= token < 127 for token in answer.tokens)
    assert answer.logprobs.shape == (24, byte_tokenizer.VOCAB)
    assert np.allclose(np.exp(answer.logprobs).sum(axis=-1), 1, atol=1e-4)


@pytest.mark.parametrize("family", TEXT)
def test_the_first_token_of_a_text_prompt_matters(zoo: Zoo, family: str) -> None:
    """A lost prefix, state or row must show: it moves a logprob by far more than the tolerance of parity."""
    (prompt,) = text_models.prompts(7, [60])
    answer = zoo.answer(family, prompt, count=1)
    other = zoo.answer(family, [prompt[0] ^ 1, *prompt[1:]], count=1)
    assert np.abs(answer.logprobs - other.logprobs).max() > 100 * oracle.TOLERANCE


@pytest.mark.parametrize("family", TEXT)
def test_the_oracle_does_not_depend_on_the_prefill_step(zoo: Zoo, family: str) -> None:
    """One token at a time and chunks of 5 give what the whole prompt gives, past the windows too."""
    (prompt,) = text_models.prompts(8, [23])
    answer = zoo.answer(family, prompt, count=8)
    for step in (1, 5):
        chunked = oracle.text_answer(zoo.text(family), prompt, count=8, step=step)
        answer.check(chunked.tokens, chunked.logprobs)


@pytest.mark.parametrize("family", VISION)
def test_vision_model_sees_each_of_its_images(zoo: Zoo, family: str) -> None:
    first, second, third = vision_models.images(5, 3, size=(32, 32))
    prompt = vision_models.prompt(family, "what is ", None, " here? and ", None, "!")
    answer = zoo.see(family, prompt, [first, second])
    assert len(answer.ids) > len(zoo.see(family, vision_models.prompt(family, "what is  here? and !")).ids)
    assert len(set(answer.tokens)) >= 6
    for images in ([third, second], [first, third], [second, first]):
        other = zoo.see(family, prompt, images, count=1)
        assert np.abs(answer.logprobs[0] - other.logprobs[0]).max() > 10 * oracle.TOLERANCE


@pytest.mark.parametrize("family", VISION)
def test_vision_model_answers_text_alone(zoo: Zoo, family: str) -> None:
    """Without images; as rendered text and as the same token ids."""
    answer = zoo.see(family, vision_models.prompt(family, "no image"))
    same = zoo.see(family, answer.ids)
    assert len(set(answer.tokens)) >= 6
    answer.check(same.tokens, same.logprobs, tolerance=1e-6)


def test_a_model_is_its_seed(zoo: Zoo, tmp_path: Path) -> None:
    """Equal bytes from equal seeds, whatever was sampled before; other bytes from another."""
    for build, folder, family in (
        (text_models.build, zoo.text("gpt_oss"), "gpt_oss"),
        (vision_models.build, zoo.vision("qwen3_vl"), "qwen3_vl"),
    ):
        wanted = (folder / "model.safetensors").read_bytes()
        again = build(family, tmp_path / f"{family}-again")
        other = build(family, tmp_path / f"{family}-other", seed=99)
        assert (again / "model.safetensors").read_bytes() == wanted
        assert (other / "model.safetensors").read_bytes() != wanted


def test_only_a_model_built_so_ends_by_itself(zoo: Zoo) -> None:
    prompts = text_models.prompts(3, [4, 9, 14, 19])
    plain = [zoo.answer("llama", p, count=48).tokens for p in prompts]
    ending = [zoo.answer("llama", p, count=48, ends=True).tokens for p in prompts]
    assert not any(byte_tokenizer.EOS in tokens for tokens in plain)
    assert any(byte_tokenizer.EOS in tokens for tokens in ending)


def test_an_answer_refuses_what_differs(zoo: Zoo) -> None:
    """The twin of every parity test: a wrong token, and a right token with a wrong logprob."""
    answer = zoo.answer("llama", text_models.prompts(7, [29])[0])
    answer.check(answer.tokens[:5], answer.chosen[:5])
    answer.check(answer.tokens, answer.logprobs + 0.5 * oracle.TOLERANCE)
    with pytest.raises(AssertionError, match="is not"):
        answer.check([*answer.tokens[:4], answer.tokens[4] ^ 1])
    with pytest.raises(AssertionError, match="off by"):
        answer.check(answer.tokens, answer.chosen + 2 * oracle.TOLERANCE)
    with pytest.raises(AssertionError, match="nothing"):
        answer.check([])


def test_equally_likely_tokens_are_both_right() -> None:
    """But for rounding; the logprobs up to there still count."""
    rows = np.log(np.array([[0.2, 0.4, 0.4], [0.7, 0.2, 0.1]], dtype=np.float32))
    rows[0, 1] += 2e-6
    answer = oracle.Answer((5,), (1, 0), rows)
    answer.check([2, 1], [rows[0, 2], -9.0])
    with pytest.raises(AssertionError, match="off by"):
        answer.check([2, 1], [rows[0, 2] + 1, -9.0])
    with pytest.raises(AssertionError, match="is not"):
        answer.check([0, 0])


def test_the_tokenizer_keeps_bytes_and_specials(zoo: Zoo) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(zoo.text("llama")))
    text = "Příliš žluťoučký 漢字 🙂\n\t<think>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[:-1] == list(text[: -len("<think>")].encode())
    assert ids[-1] == byte_tokenizer.TOKEN_ID["<think>"]
    assert len(tokenizer) == byte_tokenizer.VOCAB
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_are_seeded_and_differ() -> None:
    assert text_models.prompts(1, [3, 5]) == text_models.prompts(1, [3, 5])
    assert text_models.prompts(1, [8]) != text_models.prompts(2, [8])
    assert [len(p) for p in text_models.prompts(1, [1, 40])] == [1, 40]
