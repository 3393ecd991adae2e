"""How a refusal lists names, axes and problems."""

from collections.abc import Collection, Iterable, Sequence


def shown(names: Iterable[str]) -> str:
    """Return a list of at most five different names, with a count of the others.

    >>> shown(["`a`", "`b`", "`a`"]), shown(["`w`"] + [f"`v{i}`" for i in range(6)])
    ('`a`, `b`', '`w`, `v0`, `v1`, `v2`, `v3` and 2 more')
    """
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - 5} more" if len(each) > 5 else ""
    return ", ".join(each[:5]) + more


def bulleted(problems: Sequence[str]) -> str:
    """Return a list of at most eight problems, one on each line, with a count of the others."""
    lines = [f"- {problem}" for problem in problems[:8]]
    if len(problems) > 8:
        lines.append(f"- and {len(problems) - 8} more")
    return "\n".join(lines)


def spelled(names: Collection[str]) -> str:
    """Return axes as a program spells them: a name, or a tuple of names."""
    ordered: Iterable[str] = names if isinstance(names, tuple) else sorted(names)
    return repr(next(iter(ordered)) if len(names) == 1 else tuple(ordered))
