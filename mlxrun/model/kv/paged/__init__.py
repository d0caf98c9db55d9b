"""Decode rows whose keys and values lie in pages, with one attention kernel for rows of any lengths."""
