"""How good the claim of a launcher to lead is."""


def claim_of(has_generation: bool, generation: int, listed: int) -> list[int]:
    """Return the claim of a launcher; the smallest of all leads.

    The launchers of a run must agree on an order, or two would wait for each other. One that leads
    a running generation comes first, then one that knows the latest generation, then the first in
    `--rdzv-endpoint`. A launcher that was started again knows none.

    >>> min(claim_of(False, -1, 0), claim_of(False, 7, 2), claim_of(False, 7, 1))
    [1, -7, 1]
    """
    return [0 if has_generation else 1, -generation, listed]


def read_claim(given: object) -> list[int] | None:
    """Return a claim that a stranger may have sent; None if it is not a claim.

    >>> read_claim([1, 1, 0]), read_claim([1, "1", 0]), read_claim(None)
    ([1, 1, 0], None, None)
    """
    if isinstance(given, list) and len(given) == 3 and all(type(each) is int for each in given):
        return given
    return None
