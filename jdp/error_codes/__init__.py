"""Stable codes of errors, each with a page: cause, importance, remedy, an example."""

from typing import Any


def with_code(code: str, text: str) -> str:
    """Append an error's code and the command for its page.

    >>> print(with_code("JDP101", "`state.a` may differ."))
    `state.a` may differ. (jdp explain-error JDP101)
    """
    return f"{text} (jdp explain-error {code})"


def codes() -> list[str]:
    """Return all codes, in order."""
    names = (page.name for page in _pages().iterdir())
    return sorted(name.removesuffix(".md") for name in names if name.endswith(".md"))


def page(code: str) -> str | None:
    """Return the page of a code in Markdown, or None."""
    if code.upper() not in codes():
        return None
    return (_pages() / f"{code.upper()}.md").read_text(encoding="utf-8")


def title(code: str) -> str:
    """Return the title on the first line of a code's page."""
    return (page(code) or "").partition("\n")[0].removeprefix(f"# {code}: ")


# The folder of the pages, also in a zip file.
def _pages() -> Any:
    from importlib import resources  # not for each `import jdp`

    return resources.files(__name__) / "pages"
