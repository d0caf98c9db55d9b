"""Prompts with images: their embeddings, and cached features of images."""
