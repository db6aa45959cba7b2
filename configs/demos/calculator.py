"""The tool of `make demo TASK=tool`."""

import re


def calculator(expression: str) -> str:
    """Computes a product.

    Args:
        expression: two whole numbers with a star between them, such as 12*34
    """
    found = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", expression)
    if found is None:
        raise ValueError(f"{expression!r} is not two whole numbers with a star between them")
    return str(int(found[1]) * int(found[2]))
