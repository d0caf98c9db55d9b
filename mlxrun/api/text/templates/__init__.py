"""Chat templates: rendering them within limits, and finding out what they support."""
