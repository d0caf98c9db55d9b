"""Turns texts into tokens, and tokens into texts."""
