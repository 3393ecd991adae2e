"""Stable codes of errors, each with a page: cause, why it matters, what to write, an example."""

from pathlib import Path

_PAGES = Path(__file__).with_name("pages")


def with_code(code: str, text: str) -> str:
    """Return the text of an error, ended by its code and how to read more.

    Args:
      code: such as "JDP101". A page of that name stands beside this file.
      text: of the error, in sentences.

    >>> print(with_code("JDP101", "`state.a` may differ."))
    `state.a` may differ. (jdp explain-error JDP101)
    """
    return f"{text} (jdp explain-error {code})"


def codes() -> list[str]:
    """Return all codes, in order."""
    return sorted(path.stem for path in _PAGES.glob("*.md"))


def page(code: str) -> str | None:
    """Return the page of a code in Markdown, None if there is no such code.

    Args:
      code: such as "JDP101", in upper or lower case.
    """
    path = _PAGES / f"{code.upper()}.md"
    return path.read_text(encoding="utf-8") if code.upper() in codes() else None


def title(code: str) -> str:
    """Return the first line of the page of a code, without the code."""
    return (page(code) or "").partition("\n")[0].removeprefix(f"# {code}: ")
