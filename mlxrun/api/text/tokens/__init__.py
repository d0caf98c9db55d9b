"""Texts as tokens, and tokens as texts."""
