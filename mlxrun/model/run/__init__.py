"""Computes the steps that the scheduler plans."""
