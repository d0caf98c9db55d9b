"""`mlxrun bench serve`: measures running servers as a client sees them."""
