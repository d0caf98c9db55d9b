"""Structured output: grammars of response formats and tool calls, and the budget of reasoning tokens."""
