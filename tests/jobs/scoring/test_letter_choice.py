"""Which option an answer chooses, in the words of real models."""

from __future__ import annotations

import time

import pytest

from mlxrun.jobs.scoring.letter_choice import find_letters, name_option, normalize_option

OPTIONS = ("Paris", "London", "New York", "York")


@pytest.mark.parametrize(
    ("answer", "letters"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) London", "B"),
        ("B: London", "B"),
        ("B - London", "B"),
        ("B (London)", "B"),
        ("**B**", "B"),
        ("**B) London**", "B"),
        ("The answer is B.", "B"),
        ("The answer is **D**", "D"),
        ("The answer is \\(B\\)", "B"),
        ("The correct answer is (C) New York.", "C"),
        ("The correct option is B", "B"),
        ("The answer is option B", "B"),
        ("The best answer is **A. Paris**.", "A"),
        ("The correct choice would be C: New York", "C"),
        ("answer is therefore B", "B"),
        ("Answer: C", "C"),
        ("Answer:B", "B"),
        ("**Answer:** C", "C"),
        ("Answer \N{EN DASH} B", "B"),
        ("Final answer: B", "B"),
        ("The answer is: \n\nB", "B"),
        ("The answer is: \n\n**B) London**", "B"),
        ("<answer>B</answer>", "B"),
        ("So $\\boxed{B}$", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{(B) London}", "B"),
        ("\\boxed{London}", "B"),
        ("First \\boxed{A}, but then \\boxed{B}", "B"),
        ("Option B is correct.", "B"),
        ("(B) is the best choice", "B"),
        ("I choose B", "B"),
        ("I\N{RIGHT SINGLE QUOTATION MARK}d go with B because it is right", "B"),
        ("It's B.", "B"),
        ("London", "B"),
        ("london.", "B"),
        ("I think it is London.", "B"),
        ("The answer is London", "B"),
        ("New York", "C"),
        ("It is in New York.", "C"),
        ("York", "D"),
        ("The answer is a city, namely London", "B"),
        ("If the answer is A then x. Therefore the answer is B.", "B"),
        ("Let me think. A is wrong since x. The right one must be (D).", "D"),
        ("The answer is not B. It is C.", "C"),
        # Ambiguous ones name several, and those without a choice none.
        ("A or B", "AB"),
        ("The answer is A or B.", "AB"),
        ("The answer is A/B", "AB"),
        ("A) Paris\nB) London", "AB"),
        ("Both A and B are true", "AB"),
        ("Paris or London", "AB"),
        ("", ""),
        ("I do not know", ""),
        ("A dog barks", ""),
        ("The answer is I", ""),
        ("None of the above", ""),
        ("Answer: Not B", ""),
    ],
)
def test_answers_of_real_models(answer: str, letters: str) -> None:
    assert "".join(find_letters(answer, OPTIONS)) == letters


@pytest.mark.parametrize(
    ("answer", "letters"),
    [
        ("答案是B", ["B"]),
        ("经过计算,答案是**B**。", ["B"]),
        ("正确答案\uff1aC\u3002", ["C"]),
        ("答案是B选项", ["B"]),
        ("\uff22", ["B"]),
        ("\uff08\uff22\uff09", ["B"]),
        ("答案不是B", []),
    ],
)
def test_chinese_statements_and_fullwidth_letters(answer: str, letters: list[str]) -> None:
    assert find_letters(answer) == letters
    assert find_letters(answer, ["一\uff08x\uff09", "二", "三"]) == letters


@pytest.mark.parametrize(
    ("answer", "letters"),
    [
        ("The answer is A, I believe.", "A"),
        ("The answer is B and I am sure.", "B"),
        ("The answer is B, A is wrong.", "B"),
        ("The answer is **B**, C would be too small.", "B"),
        ("The answer is B, A and C are wrong.", "B"),
        ("The answer is B, A, C are wrong.", "B"),
        ("The best answer is option B, D being close.", "B"),
        # Lists stay ambiguous.
        ("The answer is A, B.", "AB"),
        ("The answer is A, B", "AB"),
        ("The answer is (A), (B) or (C).", "ABC"),
        ("The answer is A, B, and C because x.", "ABC"),
        ("The answer is **A**, **B**", "AB"),
        ("The answer is H or I.", "HI"),
        ("The answer is A or B depending on x", "AB"),
    ],
)
def test_a_letter_behind_a_comma_may_begin_a_clause(answer: str, letters: str) -> None:
    assert "".join(find_letters(answer)) == letters
    assert "".join(find_letters(answer, list("abcdefghi"))) == letters


def test_fullwidth_texts_of_options() -> None:
    assert find_letters("一\uff08x\uff09", ["二", "一\uff08x\uff09"]) == ["B"]


def test_letters_without_texts() -> None:
    """Letters beyond the number of options are none."""
    assert find_letters("The answer is F.") == ["F"]
    assert find_letters("The answer is F.", ("w", "x", "y", "z")) == []
    assert find_letters("London") == []


def test_options_that_are_equal_when_normalized() -> None:
    """Their text chooses neither for certain; the letter still does."""
    assert find_letters("B", ("x", "X")) == ["B"]
    assert find_letters("x is it", ("x", "X")) != ["A"]


def test_names() -> None:
    assert (name_option(0), name_option(25)) == ("A", "Z")
    assert (
        normalize_option(" **Cafe\N{COMBINING ACUTE ACCENT}  Noir.** ")
        == "caf\N{LATIN SMALL LETTER E WITH ACUTE} noir"
    )


@pytest.mark.parametrize("text", [" ", "*", "* ", "\n", "(A", "a\n ", "answer ", "*_"])
def test_long_answers_take_no_long_time(text: str) -> None:
    """Quadratic searches over a long answer would take hours. The end is read."""
    began = time.process_time()
    assert find_letters(text * 200_000 + "\nThe answer is B.", OPTIONS) == ["B"]
    assert time.process_time() - began < 20


def test_long_lists_take_no_long_time() -> None:
    began = time.process_time()
    for text in ("A, ", "A , option ", "A and B, ", " * , B"):
        find_letters("The answer is C, " + text * 2000 + "x")
    assert time.process_time() - began < 5
