"""Draws the images of the documentation: `python -m benchmarks.plots`.

The figures come from the JSON files in `benchmarks/results`; nothing is measured here.
"""
