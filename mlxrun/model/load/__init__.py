"""Loads a model: from its files to a model in memory."""
