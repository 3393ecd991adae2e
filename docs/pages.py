"""What `make docs` adds to docs/: pages that lie elsewhere, and doctests that read as examples.

Each page is in the site as Markdown, too: quickstart.md beside quickstart/. `llms.txt` lists them.
The reference has its names there, and no docstrings: those are in the sources.
"""

import re
import textwrap
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# The site has the folders of the repository, and docs/ beside them at the top.
ELSEWHERE = {"README.md": "index.md"} | {
    name: name
    for name in (
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "benchmarks/README.md",
        "examples/README.md",
    )
}

# By source: title and Markdown.
_pages = {}


def on_files(files, config):
    """Add the pages that do not lie in docs/."""
    for source, target in ELSEWHERE.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links that hold on GitHub into links of the site, where docs/ lies at the top."""
    if page.file.src_uri in ELSEWHERE.values():
        markdown = re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    else:
        up = "../" * page.file.src_uri.count("/")
        markdown = markdown.replace(f"]({up}../", f"]({up}")
    _pages[page.file.src_uri] = page.title, markdown
    return markdown


def on_pre_build(config):
    """Forget the pages of an earlier build."""
    _pages.clear()


def on_post_build(config):
    """Write each page as Markdown, and the list of them."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for source in (each for entry in config.nav for each in entry.values()):
        title, markdown = _pages[source]
        path = site / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown)
        lines.append(f"- [{title}]({source}): {_about(markdown)}")
    (site / "llms.txt").write_text("\n".join([*lines, ""]))


def _about(markdown):
    """Return the first sentence of a page, without code and links."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S)
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose)
    first = next(it for it in re.split(r"\n\s*\n", prose) if re.match(r"[A-Z`]", it))
    return re.split(r"(?<=[.?:])\s", " ".join(first.split()))[0].rstrip(":")


class DoctestsAreExamples(griffe.Extension):
    """Puts the doctests that end a docstring under a heading: Markdown takes >>> for quotes."""

    def on_instance(self, *, obj, **_):
        """Change the docstring of any function, class or attribute."""
        doc = obj.docstring
        if doc and (found := re.search(r"^>>> ", doc.value, re.M)):
            doctests = textwrap.indent(doc.value[found.start() :], "    ")
            doc.value = f"{doc.value[: found.start()]}Examples:\n{doctests}"
