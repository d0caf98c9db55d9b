"""Parsers of the formats in which models write tool calls and reasoning."""
