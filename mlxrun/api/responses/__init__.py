"""OpenAI's Responses API: bodies become chat bodies, answers become typed items and events."""
