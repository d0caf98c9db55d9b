"""A server of several models, each in a process of its own."""
