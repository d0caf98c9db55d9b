"""Evaluation harnesses run on an engine in their own process through these modules."""
