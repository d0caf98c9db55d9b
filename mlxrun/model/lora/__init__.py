"""LoRA adapters: read from their folders, and computed for the rows that use them."""
