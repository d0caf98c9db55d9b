"""Copies of rows for the prefix cache: out of layer caches, into layer caches, as bytes."""
