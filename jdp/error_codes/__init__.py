"""Stable codes of errors, each with a page: cause, why it matters, what to write, an example."""

from typing import Any


def with_code(code: str, text: str) -> str:
    """Return the text of an error, ended by its code and how to read more.

    >>> print(with_code("JDP101", "`state.a` may differ."))
    `state.a` may differ. (jdp explain-error JDP101)
    """
    return f"{text} (jdp explain-error {code})"


def codes() -> list[str]:
    """Return all codes, in order."""
    names = (page.name for page in _pages().iterdir())
    return sorted(name.removesuffix(".md") for name in names if name.endswith(".md"))


def page(code: str) -> str | None:
    """Return the page of a code in Markdown, None if there is no such code."""
    if code.upper() not in codes():
        return None
    return (_pages() / f"{code.upper()}.md").read_text(encoding="utf-8")


def title(code: str) -> str:
    """Return the first line of the page of a code, without the code."""
    return (page(code) or "").partition("\n")[0].removeprefix(f"# {code}: ")


# The folder of the pages, also where jdp is in a zip file.
def _pages() -> Any:
    from importlib import resources  # not for each `import jdp`

    return resources.files(__name__) / "pages"
