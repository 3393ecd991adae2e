"""Times many contestants in alternating rounds, and compares them with a goal."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jdp.tools.paired_timing import alternate as alternate
from jdp.tools.paired_timing import interval


class Word(str):
    """A word in place of a number in a row; any number format prints it."""

    def __format__(self, spec: str) -> str:
        return str(self)


def against(
    found: Mapping[str, np.ndarray], jdp: str, rival: str, goal: float | None
) -> dict[str, Any]:
    """Return the cells of a row for a rival: its time as a multiple of jdp's.

    Args:
      found: result of `alternate`; missing rivals are absent.
      jdp: name of jdp's contestant.
      rival: name of the rival.
      goal: the ratio to reach, or None.
    """
    row: dict[str, Any] = {"rival": rival, "jdp_us": float(np.median(found[jdp])) * 1e6}
    row["goal"] = Word("-") if goal is None else goal
    if rival not in found:
        row |= dict.fromkeys(("rival_us", "ratio", "interval", "met"), Word("missing"))
        return row | {"rounds": len(found[jdp])}
    ratios = found[rival] / found[jdp]
    ratio, (low, high) = float(np.median(ratios)), interval(ratios)
    met = Word("-") if goal is None else "yes" if ratio >= goal else "no"
    row |= {"rival_us": float(np.median(found[rival])) * 1e6, "ratio": ratio, "met": met}
    return row | {"interval": f"{low:.2f} to {high:.2f}", "rounds": len(ratios)}


AGAINST_COLUMNS = {
    "rival": "{rival}",
    "jdp, us": "{jdp_us:.1f}",
    "rival, us": "{rival_us:.1f}",
    "rival / jdp": "{ratio:.2f}",
    "95 % interval": "{interval}",
    "rounds": "{rounds}",
    "goal": "{goal:.3g}",
    "met": "{met}",
}
