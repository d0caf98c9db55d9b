"""Runs written in the formats of other programs. Their owners' libraries are not needed for it."""
