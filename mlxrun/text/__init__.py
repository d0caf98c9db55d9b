"""Host side of a request: JSON bodies to Requests, token events back to text. No mlx anywhere below."""
