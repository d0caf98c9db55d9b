"""Responses that are stored, or that run in the background."""
