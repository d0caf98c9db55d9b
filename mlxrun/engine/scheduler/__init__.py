"""The scheduler decides who runs next. It is pure Python and sees integers only: no mlx, numpy, asyncio,
threads."""
