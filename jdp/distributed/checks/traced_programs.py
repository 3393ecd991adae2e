"""The programs of training steps that this process has traced, for the runs that continue them."""

import hashlib
import json
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

# Kept of a process that traces many: of each kind, and kinds.
_MAX_PROGRAMS, _MAX_KINDS = 8, 32


class Lines(Protocol):
    """The lines of a program, such as `analysis.program_lines.ProgramLines`."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how often the program has each line, by a digest of the line."""
        ...

    @property
    def digest(self) -> str:
        """Return a digest of all lines."""
        ...

    def difference(self, saved: Mapping[str, int]) -> str:
        """Describe the first difference from the `counts` of another program."""
        ...


class TracedProgram:
    """A program whose facts and lines nobody has asked for.

    Args:
      name: of its step.
      facts_of: returns JSON: on what the program may depend that is not the author's.
      lines_of: returns the lines of the program.
    """

    def __init__(self, name: str, facts_of: Callable[[], Any], lines_of: Callable[[], Lines]):
        self.name = name
        self._of: tuple[Callable[[], Any], Callable[[], Lines]] | None = facts_of, lines_of

    def take(self) -> tuple[Any, Lines]:
        """Return the facts and the lines, and let go of the program. Only once."""
        of, self._of = self._of, None
        assert of is not None
        facts_of, lines_of = of
        return facts_of(), lines_of()


class TracedPrograms:
    """Programs by their kind: the name of the step, and all on which its program may depend.

    >>> programs = TracedPrograms()
    >>> programs.kinds()
    {}
    """

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Lines]] = {}
        # Their steps hold them: a process that drops a step also drops its program.
        self._traced: deque[weakref.ref[TracedProgram]] = deque(maxlen=_MAX_KINDS)

    def record(self, traced: TracedProgram) -> None:
        """Record a program, for as long as the caller holds it or until its lines are asked for."""
        self._traced.append(weakref.ref(traced))

    def kinds(self) -> dict[str, dict[str, Lines]]:
        """Return the programs by kind and digest."""
        while self._traced:
            if (traced := self._traced.popleft()()) is not None:
                self._add(traced.name, *traced.take())
        return {kind: {**programs} for kind, programs in self._kinds.items()}

    def _add(self, name: str, facts: Any, lines: Lines) -> None:
        text = json.dumps(facts, sort_keys=True)
        kind = f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        programs = self._kinds.setdefault(kind, {})
        programs[lines.digest] = lines
        for several, most in ((programs, _MAX_PROGRAMS), (self._kinds, _MAX_KINDS)):
            if len(several) > most:
                del several[next(iter(several))]


current = TracedPrograms()
