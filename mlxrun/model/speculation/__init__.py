"""Speculative decoding: drafted tokens are more rows of a decode forward."""
