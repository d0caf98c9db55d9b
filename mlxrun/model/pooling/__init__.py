"""Embeddings and scores of texts: sentence-transformers' config, encoders, pooling, and their runner."""
