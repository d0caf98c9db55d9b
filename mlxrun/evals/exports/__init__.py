"""Runs written in the formats of other programs, without their libraries."""
