"""Chat templates: rendered within limits, and asked what they know."""
