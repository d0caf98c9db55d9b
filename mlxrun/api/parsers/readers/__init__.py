"""Readers of the syntax that several families share: JSON, XML-like tags, key-value pairs."""
