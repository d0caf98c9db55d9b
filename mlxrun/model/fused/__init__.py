"""Decode steps of usual decoder layers with few kernels."""
