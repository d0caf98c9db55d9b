"""Agents: lines whose model calls tools, turn by turn, until it answers."""
