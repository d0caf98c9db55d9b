"""Scores: answers compared with what is expected, scores by group, confidence intervals."""
