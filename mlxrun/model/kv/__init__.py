"""Keys and values: of rows of any lengths, in pages, and as copies."""
