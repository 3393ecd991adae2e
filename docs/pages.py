"""What `make docs` adds to docs/: pages that lie elsewhere, and doctests that read as examples."""

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


def on_files(files, config):
    """Add the pages that do not lie in docs/."""
    for source, target in ELSEWHERE.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links that hold on GitHub into links of the site, where docs/ lies at the top."""
    if page.file.src_uri in ELSEWHERE.values():
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    up = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"]({up}../", f"]({up}")


class DoctestsAreExamples(griffe.Extension):
    """Puts the doctests that end a docstring under a heading: Markdown takes >>> for quotes."""

    def on_instance(self, *, obj, **_):
        """Change the docstring of any function, class or attribute."""
        doc = obj.docstring
        if doc and (found := re.search(r"^>>> ", doc.value, re.M)):
            doctests = textwrap.indent(doc.value[found.start() :], "    ")
            doc.value = f"{doc.value[: found.start()]}Examples:\n{doctests}"
