"""What the emulator raises."""

from __future__ import annotations


class EmulatorError(Exception):
    """A kernel that Metal would not compile or run, or that does what no kernel may do."""
