"""A server whose engines are workers."""
