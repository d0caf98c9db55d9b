"""Adapters that evaluation harnesses load, so that they run on an engine in their own process."""
