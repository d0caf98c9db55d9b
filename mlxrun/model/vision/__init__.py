"""Prompts with images: their embeddings, and features of images that were seen before."""
