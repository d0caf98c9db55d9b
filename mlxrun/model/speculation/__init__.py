"""Speculative decoding: drafted tokens as further rows of a decode forward."""
