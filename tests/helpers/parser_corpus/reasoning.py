"""Reasoning in every family's tags, alone; with calls they are among the cases of the calls."""

from __future__ import annotations

from tests.helpers.parser_driver import Case, Item, Reasoning

# name, opener, end, whether an opener counts in the middle of text
TAGS = [
    ("think", "<think>", "</think>", False),
    ("seed_oss", "<seed:think>", "</seed:think>", False),
    ("gemma4", "<|channel>thought", "<channel|>", True),
    ("mistral", "[THINK]", "[/THINK]", True),
    ("kimi_vl", "◁think▷", "◁/think▷", False),
    ("cohere", "<|START_THINKING|>", "<|END_THINKING|>", True),
    ("longcat", "<longcat_think>", "</longcat_think>", False),
    ("granite3_3", "<think>", "</think>", False),
    ("granite", "Here is my thought process:", "Here is my response:", False),
    ("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>", True),
    ("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", True),
    ("hunyuan", "<think>", "</think>", False),
    ("ernie45", "<think>", "</think>", False),
    ("minimax_m3", "<mm:think>", "</mm:think>", True),
    ("apertus", "<|inner_prefix|>", "<|inner_suffix|>", True),
    ("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", False),
    ("ui_tars", "Thought:", "Action:", False),
]


def _of(name: str, a: str, b: str, anywhere: bool) -> list[Case]:
    def case(what: str, text: str, want: list[Item], opened: bool = False) -> Case:
        return Case(f"{name}: {what}", None, text, want, reasoning=name, opened=opened)

    hm = Reasoning("hm")
    cases = [
        case("reasoning and text", f"{a}\nhm\n{b}\n\nYes.", [hm, "Yes."]),
        case("reasoning alone", f"{a}hm{b}", [hm]),
        case("empty reasoning", f"{a}\n\n{b}\n\nYes.", ["Yes."]),
        case("space before", f"\n\n{a}hm{b}Yes.", [hm, "Yes."]),
        case("text alone", "Yes.\n", ["Yes.\n"]),
        case("inner space stays", f"{a} a \n\n b {b} c \n d ", [Reasoning("a \n\n b"), "c \n d "]),
        case("unicode", f"{a}přemýšlím 🤔{b}Žluťoučký", [Reasoning("přemýšlím 🤔"), "Žluťoučký"]),
        case("cut in the reasoning", f"{a}\nhm, and", [Reasoning("hm, and")]),
        case("cut in the end tag", f"{a}hm{b[:-1]}", [Reasoning(f"hm{b[:-1]}")]),
        case("cut in the opener", a[:-1], [Reasoning("though")] if name == "gemma4" else [a[:-1]]),
        case("opener alone", a, []),
        case("opened by the prompt", f"hm\n{b}\nYes.", [hm, "Yes."], opened=True),
        case("opened by both", f"\n{a}hm{b}Yes.", [hm, "Yes."], opened=True),
        case("opened and cut", "hm, and", [Reasoning("hm, and")], opened=True),
        case("opened and closed at once", f"{b}Yes.", ["Yes."], opened=True),
        case("opener within reasoning", f"{a}hm {a} x{b}Yes.", [Reasoning(f"hm {a} x"), "Yes."]),
        case("reasoning twice", f"{a}hm{b}\n{a}and{b}Yes.", [hm, Reasoning("and"), "Yes."]),
    ]
    if anywhere:  # a special token is never text
        cases += [
            case("an end without reasoning", f"Yes {b} no", ["Yes", "no"]),
            case("an end too many", f"{a}hm{b}Yes {b} no", [hm, "Yes", "no"]),
            case("in the middle", f"Yes. {a}hm{b} No.", ["Yes.", hm, "No."]),
        ]
    else:
        cases += [
            case("an end without reasoning", f"Yes {b} no", [f"Yes {b} no"]),
            case("an end too many", f"{a}hm{b}Yes {b} no", [hm, f"Yes {b} no"]),
        ]
        cases.append(case("in the middle", f"Yes. {a}hm{b} No.", [f"Yes. {a}hm{b} No."]))
    return cases


_HM = Reasoning("hm")
ODD = [
    Case(
        "granite: the other spelling",
        None,
        "Here's my thought process: hm Here's my response: Yes.",
        [_HM, "Yes."],
        reasoning="granite",
    ),
    Case(
        "granite3_3: a response in tags",
        None,
        "<think>hm</think>\n<response>Yes.</response>",
        [_HM, "Yes."],
        reasoning="granite3_3",
    ),
    Case(
        "cohere: a response in tags",
        None,
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        [_HM, "Yes."],
        reasoning="cohere",
    ),
    Case("gemma4: empty channel", None, "<|channel>thought\n<channel|>Yes.", ["Yes."], reasoning="gemma4"),
    Case(
        "think: tags in words",
        None,
        "Use <think> and </think>.",
        ["Use <think> and </think>."],
        reasoning="think",
    ),
    Case("think: no reasoning parser", None, "<think>hm</think>", ["<think>hm</think>"]),
]

CASES: list[Case] = [*(case for tags in TAGS for case in _of(*tags)), *ODD]
