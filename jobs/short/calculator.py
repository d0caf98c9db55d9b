def product(first: int, second: int) -> str:
    """Multiply two numbers."""
    return str(first * second)
