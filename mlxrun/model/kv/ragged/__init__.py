"""Rows of any lengths in one decode batch: row groups, the attention seam and the models' layer caches."""
