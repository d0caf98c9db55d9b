"""What the engine computes besides answers: vectors, and the choice of tokens."""
