"""Sparse prefill: the tokens of a prompt that a draft model finds important, at their own positions."""
