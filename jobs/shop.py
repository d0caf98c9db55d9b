PRICES = {"apple": 2.0, "pear": 1.0}


def find_price(fruit: str) -> str:
    """Find the price of a fruit, given by its name in the singular."""
    return f"{PRICES[fruit]} euros" if fruit in PRICES else f"There are only {', '.join(PRICES)}."


def buy(fruit: str, count: int, state: dict) -> str:
    """Buy some pieces of a fruit."""
    left = state["stock"].get(fruit, 0)
    if count > left:
        return f"There are only {left}."
    state["stock"][fruit] = left - count
    state["basket"][fruit] = state["basket"].get(fruit, 0) + count
    return "bought"


def check_basket(expected: dict, state: dict) -> dict:
    return {"score": state["basket"] == expected, "extracted": state["basket"]}
