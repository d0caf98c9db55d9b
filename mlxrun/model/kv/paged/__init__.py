"""Decode rows with their keys and values in pages. One attention kernel serves rows of any lengths."""
