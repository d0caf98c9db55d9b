"""What requests of every API have in common."""
