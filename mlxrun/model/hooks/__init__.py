"""The hooks: all changes to a library's model."""
