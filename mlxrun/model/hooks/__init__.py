"""Everything that changes a library's model."""
