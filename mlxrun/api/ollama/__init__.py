"""Ollama's API: bodies become bodies of OpenAI's, answers become lines of JSON."""
