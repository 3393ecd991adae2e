"""A progress line below a terminal's output."""

import io
from collections.abc import Sequence

# Between lines without a terminal.
PLAIN_S = 30.0
# Erase to the row's end; go up one row.
_ERASE, _UP = b"\x1b[K", b"\x1b[A"


class LiveLine:
    """The bytes that draw and erase the line; they set no terminal mode."""

    def __init__(self) -> None:
        self._parts: Sequence[str] = ()
        self._is_drawn = False
        self._is_behind_bar = False  # the output ends with a bar, without \n

    @property
    def is_due(self) -> bool:
        """Whether it has an undrawn text."""
        return bool(self._parts) and not self._is_drawn

    def set_text(self, parts: Sequence[str]) -> None:
        """Set the next text."""
        self._parts = parts

    def above(self, output: bytes) -> bytes:
        """Return the bytes that replace it by output that ends with \\n or \\r."""
        erased = self.erase()
        self._is_behind_bar = output.endswith(b"\r")
        return erased + output

    def erase(self) -> bytes:
        """Return the bytes that erase it."""
        if not self._is_drawn:
            return b""
        self._is_drawn = False
        return b"\r" + _ERASE + (_UP if self._is_behind_bar else b"")

    def draw(self, columns: int) -> bytes:
        """Return the bytes that redraw it."""
        erased = self.erase()
        self._is_drawn = True
        return erased + (b"\n" if self._is_behind_bar else b"") + self._rendered(columns)

    def end(self) -> bytes:
        """Return the bytes that end it in place."""
        is_drawn, self._is_drawn, self._parts = self._is_drawn, False, ()
        return b"\n" if is_drawn else b""

    def _rendered(self, columns: int) -> bytes:
        # Up to a second of imports.
        from rich.console import Console
        from rich.text import Text

        text = Text()
        for i, part in enumerate(self._parts):
            name, _, value = part.rpartition(" ") if part.startswith(_NAMED) else ("", "", part)
            text.append(" · " if i else "", "dim")
            text.append(f"{name} " if name else "", "dim")
            text.append(value, "bold" if i == 0 else "")
        console = Console(
            file=io.StringIO(),
            width=max(columns - 1, 1),
            force_terminal=True,
            highlight=False,
            legacy_windows=False,
        )
        with console.capture() as captured:
            console.print(text, end="", no_wrap=True, overflow="ellipsis")
        return captured.get().encode()


# Prefixes of a name and a number.
_NAMED = ("step ", "loss ", "commit ", "checkpoint ")
