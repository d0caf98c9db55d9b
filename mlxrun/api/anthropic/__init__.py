"""Anthropic's Messages API: bodies become chat bodies, answers become content blocks and events."""
