"""Splits the output of a process into lines."""

import re

# A longer line is shown in parts.
MAX_LINE_BYTES = 2**20

# A progress bar ends its lines with a carriage return, and is shown while it moves. A carriage
# return at the very end may be half of \r\n, so it waits for the next bytes.
_END_OF_LINE = re.compile(rb"\r\n|\n|\r(?!\Z)")


class LineSplitter:
    r"""Splits a stream into lines.

    Attributes:
      rest: a line that has no end so far.

    >>> splitter = LineSplitter()
    >>> splitter.split(b"10%\r20%\r\n3"), splitter.rest
    ([b'10%\r', b'20%\r\n'], b'3')
    >>> splitter.split(b"")
    [b'3\n']
    """

    def __init__(self) -> None:
        self.rest = b""

    def split(self, data: bytes) -> list[bytes]:
        """Return the lines that end in the next bytes; no bytes are the end of the stream."""
        text, end, lines = self.rest + data, 0, []
        for found in _END_OF_LINE.finditer(text) if data else ():
            lines.append(text[end : found.end()])
            end = found.end()
        self.rest = text[end:]
        if self.rest and (not data or len(self.rest) > MAX_LINE_BYTES):
            lines.append(self.rest.rstrip(b"\r") + b"\n")
            self.rest = b""
        return lines
