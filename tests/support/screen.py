"""A terminal for tests: what is on the screen after some bytes."""

import re

_PIECE = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """Rows of text and a cursor. Knows what jdp writes: K, A and m, and nothing else.

    A row that is longer than `columns` would wrap, which is an error here.
    """

    def __init__(self, columns=80):
        self.columns = columns
        self.rows, self.row, self.column = [""], 0, 0

    def write(self, data):
        text, end = data.decode().replace("\r\n", "\n"), 0
        while end < len(text):
            piece = _PIECE.match(text, end)
            assert piece, f"unknown: {text[end:]!r}"
            end = piece.end()
            number, code, move, words = piece.groups()
            if words:
                here = self.rows[self.row].ljust(self.column)
                self.column += len(words)
                assert self.column < self.columns, f"it wraps: {words!r}"
                rest = here[self.column :]
                self.rows[self.row] = here[: self.column - len(words)] + words + rest
            elif move == "\r":
                self.column = 0
            elif move == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row == len(self.rows))
            elif code == "K":
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif code == "A":
                self.row -= int(number or 1)
                assert self.row >= 0
            else:
                assert code == "m", f"unknown: {piece[0]!r}"

    @property
    def lines(self):
        """The rows, without the empty ones at the end."""
        rows = [row.rstrip() for row in self.rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows
