"""Multiple choice by letter: finds the option that an answer chooses.

Real answers say it as "B", "(b)", "B) Paris", "**B**", "boxed{B}", "The answer is B.", "I choose Paris". The
kinds of evidence below are tried from the strongest to the weakest; the first that finds something decides.
If it finds several options, the answer is ambiguous. Of several statements such as "the answer is B", the
last counts. Of a long answer only the end is read.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

_MOST = 10_000  # characters at the end of an answer that are read
_RUN = re.compile(r"([*_`\"'$(\[{<>\s])\1{2,}")
_MARKS = r"[\s*_`\"'$(\[{<]*"  # that may stand before a letter: Markdown, quotes, brackets
_END = r"(?=[\s*_`\"'$]*(?:[)\]}>.,:;!?]|$|\n))"  # a letter that is no word ends with one of these
_VERBS = r"(?:choose|pick|select|go(?:ing)? with|opt for|choosing|selecting)"
_STATEMENT = re.compile(
    r"\b(?:answer|choice|option|response|selection)\b[\s*_`\"']*"
    r"(?:(?:would|should|must|will)\s+be|is|was|=|:|->|-\s)"
    r"[\s*_`\"':]*(?:therefore|clearly|definitely|thus)?[\s,:]*(?:option|choice|letter|answer|number)?[\s:]*"
    rf"|\b{_VERBS}\s+(?:(?:the\s+)?(?:option|choice|answer|letter)\s*)?[:]?"
    r"|答案[\s*_]*(?:应该|應該|应|應)?(?:是|为|為|选|選|:)[\s*_:]*(?:选项|選項)?",
    re.IGNORECASE,
)
_CORRECT = re.compile(
    rf"\b(?:option|choice|answer|letter)?\s*{_MARKS}([A-Z])[)\].*_`\"']*\s+is\s+"
    r"(?:the\s+)?(?:(?:most|best)\s+)?(?:correct|right|best|true|appropriate)\b"
)
_CLOSE, _NEXT = r"[\s*_`\"')\]]*", rf"{_MARKS}(?:option\s+)?(?!I\s+\w)[A-Z]\b(?!')"
_JOINED = r"(?:,?\s*(?:or|and)|/|&)"  # what joins two letters
# What follows a letter behind a comma in a list. Else it begins another clause: "B, C is wrong".
_LISTED = (
    rf"(?:{_CLOSE}(?:{_JOINED}|,){_NEXT}){{0,25}}+"  # possessive, as the ways to share the spaces multiply
    rf"(?:{_CLOSE}(?:[.:;!?(]|$|\n|,(?!{_NEXT}))|\s+(?:because|since|as|depending|both|all)\b)"
)
_OTHER = re.compile(rf"^{_CLOSE}(?:{_JOINED}{_NEXT}|,{_NEXT}(?={_LISTED}))")
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?([^{}]*)\}")
_LEADING = re.compile(
    rf"^{_MARKS}([A-Za-z])(?:[\s*_`\"'$]*[)\]}}>.:,]|[\s*_`\"'$]*$|\s+(?:-\s|\())", re.MULTILINE
)
_MARKED = re.compile(r"\*\*\s*\(?([A-Za-z])\s*(?:[).:][^*\n]*)?\*\*|\(([A-Za-z])\)")
_SINGLE_LETTER = re.compile(
    r"(?<![\w'])(?<!\b[Nn]ot )"
    r"(?:([B-HJ-Z])|(?<=[Oo]ption )([AI])|([AI])(?=\s*(?:,|/|or\b|and\b)\s*\(?[B-Z]\b))(?![\w'])"
)
_ASCII = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # fullwidth forms
    | {"\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{EN DASH}": "-", "\N{EM DASH}": "-"}
    | {"\N{IDEOGRAPHIC FULL STOP}": ".", "\N{IDEOGRAPHIC COMMA}": ","}
)


def name_option(index: int) -> str:
    """Return the letter of an option: A, B and so on."""
    return string.ascii_uppercase[index]


def normalize_option(text: str) -> str:
    """Normalize an option's text for comparison: composed (NFC), without case, outer marks and doubled white
    space."""
    text = unicodedata.normalize("NFC", text).casefold()
    return " ".join(text.split()).strip(" .,;:!?*_`\"'()[]{}$")


def find_letters(answer: str, options: Sequence[str] = ()) -> list[str]:
    """Find the letters of the options that an answer chooses: one, several if it is ambiguous, or none.
    `options`: their texts, if known."""
    letters = string.ascii_uppercase[: len(options) or None]
    texts = (normalize_option(text.translate(_ASCII)) for text in options)
    names = dict(zip(texts, letters, strict=False))
    whole = normalize_option(answer.translate(_ASCII))
    if whole and whole in names and len(names) == len(options):
        return [names[whole]]
    answer = _RUN.sub(r"\1\1", answer[-_MOST:].translate(_ASCII))
    kinds: tuple[Callable[[str, dict[str, str]], Iterator[str]], ...] = (
        _find_boxed, _find_stated, _find_leading, _find_marked, find_texts, _find_single_letters,
    )  # fmt: skip
    for find in kinds:
        found = sorted({letter.upper() for letter in find(answer, names)} & set(letters))
        if found:
            return found
    return []


def _find_boxed(answer: str, names: dict[str, str]) -> Iterator[str]:
    """The last `\\\\boxed{...}`."""
    for content in _BOXED.findall(answer)[-1:]:
        yield from _read_option(content, names)


def _find_stated(answer: str, names: dict[str, str]) -> Iterator[str]:
    """The last statement that names an option, with the alternatives that it names ("A or B")."""
    last, found = -1, list[str]()
    for match in _STATEMENT.finditer(answer):
        letters = list(_read_statement(answer[match.end() :], names))
        if letters:
            last, found = match.end(), letters
    for match in _CORRECT.finditer(answer):
        if match.start() > last:
            last, found = match.start(), [match[1]]
    yield from found


def _read_statement(rest: str, names: dict[str, str]) -> Iterator[str]:
    """The letters right behind "the answer is". The article "a" and the word "I" are none."""
    match = re.match(rf"{_MARKS}([A-Za-z])(?!(?!选项|選項)[\w'])", rest)
    if match is not None:
        is_word = match[1] in "aI" or (match[1] == "i")
        if not is_word or re.match(_END, rest[match.end() :]):
            yield match[1]
            rest = rest[match.end() :]
            while (other := _OTHER.match(rest)) is not None:
                yield other[0][-1]
                rest = rest[other.end() :]
            return
    sentence = re.split(r"[.!?](?:\s|$)|\n", rest.lstrip(" *_`\"'\n"), maxsplit=1)[0]
    yield from find_texts(sentence, names)


def _find_leading(answer: str, _: dict[str, str]) -> Iterator[str]:
    """Letters at the beginning of lines, marked as one: "B", "(B)", "B) Paris", "B: Paris"."""
    yield from _LEADING.findall(answer)


def _find_marked(answer: str, _: dict[str, str]) -> Iterator[str]:
    """Letters in bold or in brackets, anywhere."""
    for bold, bracketed in _MARKED.findall(answer):
        yield bold or bracketed


def find_texts(answer: str, names: Mapping[str, str]) -> Iterator[str]:
    """Find the options whose text occurs, but not one that only occurs within a longer one. `names`: what is
    yielded, by normalized text."""
    text = normalize_option(answer)
    for name in sorted(filter(None, names), key=len, reverse=True):
        pattern = rf"(?<!\w){re.escape(name)}(?!\w)"
        if re.search(pattern, text):
            yield names[name]
            text = re.sub(pattern, "\0", text)


def _find_single_letters(answer: str, _: dict[str, str]) -> Iterator[str]:
    """Capital letters that are words of their own, unless "not" stands before them; "A" and "I" only in
    "option A" and "A or B"."""
    for match in _SINGLE_LETTER.finditer(answer):
        yield match[match.lastindex or 0]


def _read_option(content: str, names: dict[str, str]) -> Iterator[str]:
    """An option by its letter or its text."""
    match = re.fullmatch(rf"{_MARKS}([A-Za-z])(?:\s*[).:\]].*)?\s*", content.strip())
    if match is not None:
        yield match[1]
    elif (name := normalize_option(content)) in names:
        yield names[name]
