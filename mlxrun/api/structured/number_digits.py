"""Bounds the digits of numbers in JSON that a grammar lets grow without end.

A schema cannot do it: a bound of the value leaves fractions endless, and forbids exponents in llguidance. So
digits are counted as they come. Texts are left alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

DIGITS = frozenset(b"0123456789")
_QUOTE, _BACKSLASH = b'"\\'


class _DigitRun(enum.Enum):
    """Digits before the point of a number, behind it, or of its exponent. The values: the most of each."""

    WHOLE = 25
    FRACTION = 30
    EXPONENT = 3


@dataclass(slots=True)
class NumberDigits:
    """Where in a JSON text an answer is, as far as numbers need it."""

    part: _DigitRun = _DigitRun.WHOLE
    digits: int = 0
    in_text: bool = False
    escaped: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the number that is being written should have no more digits."""
        return self.digits >= self.part.value

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        for byte in data:
            if self.in_text:
                ends = byte == _QUOTE and not self.escaped
                self.escaped = byte == _BACKSLASH and not self.escaped
                self.in_text = not ends
            elif byte in DIGITS:
                self.digits += 1
            elif byte in b"eE" and self.digits:  # else of `true` and `false`
                self.part, self.digits = _DigitRun.EXPONENT, 0
            elif not (byte in b"+-" and self.part is _DigitRun.EXPONENT):
                self.part, self.digits = _DigitRun.FRACTION if byte == ord(".") else _DigitRun.WHOLE, 0
                self.in_text = byte == _QUOTE
