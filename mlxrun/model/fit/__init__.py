"""What a model needs in memory, by its files alone: no weight is read, and nothing is computed."""
