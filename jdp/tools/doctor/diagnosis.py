"""One line of `jdp doctor`'s report."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

OK, WARNING, ERROR = "ok", "warning", "error"
_WIDTH = 96


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """One check's result; `why` and `do` are empty if ok.

    An ERROR is failed or wrong training, a WARNING slower or possibly failing. No secrets: the
    report is pasted into issues.
    """

    check: str
    level: str
    found: str
    why: str = ""
    do: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def checked(check: str, examine: Callable[[], Diagnosis]) -> Diagnosis:
    """Return a check's diagnosis; a failed check is an error."""
    try:
        return examine()
    except Exception as error:
        first = str(error).strip().partition("\n")[0][:300]
        return Diagnosis(
            check,
            ERROR,
            f"the check itself failed: {type(error).__name__}: {first}",
            "What cannot be examined cannot be trusted.",
            "Report it with the output of `jdp doctor --json`.",
        )


def is_healthy(by_process: Mapping[int, Iterable[Diagnosis]]) -> bool:
    """Whether no check found an error."""
    return all(it.level != ERROR for found in by_process.values() for it in found)


def text(by_process: Mapping[int, Sequence[Diagnosis]]) -> str:
    """Return the report; equal lines of processes appear once."""
    lines = []
    for check in dict.fromkeys(it.check for found in by_process.values() for it in found):
        same: dict[tuple, list[int]] = {}
        for process, found in by_process.items():
            for it in found:
                if it.check == check:
                    key = (it.level, it.found, it.why, it.do)
                    same.setdefault(key, []).append(process)
        for (level, found, why, do), processes in same.items():
            where = "" if len(processes) == len(by_process) else f" ({_named(processes)})"
            lines += _wrapped(f"{level:<8} {check}{where}: {found}")
            lines += [line for more in (why, do) if more for line in _wrapped(" " * 9 + more)]
    return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False
    )


def _named(processes: Sequence[int]) -> str:
    few = ", ".join(map(str, processes[:4]))
    more = f" and {len(processes) - 4} more" if len(processes) > 4 else ""
    return f"process{'es' if len(processes) > 1 else ''} {few}{more}"
