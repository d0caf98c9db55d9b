"""Rows of any lengths in one decode batch: row groups, their buffers, and the models' layer caches."""
