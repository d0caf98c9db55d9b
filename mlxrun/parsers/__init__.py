"""Formats of tool calls and of reasoning: what a model writes, split into text, thought and calls."""
