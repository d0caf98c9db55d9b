"""Who runs next: a pure-Python scheduler that sees integers only. No mlx, numpy, asyncio, threads."""
