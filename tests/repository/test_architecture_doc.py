"""Every path and every name that ARCHITECTURE.md puts in backticks or links to exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")

# `jdp/axis.py`, `tests/`, `requirements/*.txt`, `gradients.py:plan`; not `1/n`, not `a / b`.
PATH = re.compile(r"(?P<path>[A-Za-z_.][\w.*/-]*)(:(?P<name>[A-Za-z_][\w.]*))?")
FILE_TYPES = (".py", ".md", ".toml", ".txt", ".h", ".cc", ".cu", ".cuh")
# `jdp.sync_gradients`, `@jdp.train_step(weight=...)`, `jax.lax.psum`; of these packages only, for
# `state.params` is a dotted name, too.
NAME = re.compile(r"@?(?P<name>(jdp|jax|optax|flax)(\.\w+)+)(\(.*\))?")


# What a text names and the repository does not have.
def missing(text):
    for target in LINK.findall(text):
        if "://" not in target and not (ROOT / target).exists():
            yield f"link to {target}"
    for code in CODE.findall(FENCE.sub("", text)):
        if match := NAME.fullmatch(code):
            if not exists(match["name"]):
                yield f"name {code}"
        elif (match := PATH.fullmatch(code)) and is_path(match["path"]):
            files = find(match["path"])
            if not files:
                yield f"path {code}"
            elif match["name"] and not any(defines(file, match["name"]) for file in files):
                yield f"name {code}"


def is_path(text):
    return "/" in text or text.endswith(FILE_TYPES)


# `sync.py` is short for `jdp/reduction/gradients.py`.
def find(pattern):
    return [path for folder in (ROOT, ROOT / "jdp") for path in folder.glob(pattern)]


def exists(dotted):
    top, *rest = dotted.split(".")
    thing = importlib.import_module(top)
    for i, name in enumerate(rest):
        try:
            thing = getattr(thing, name)
        except AttributeError:
            try:
                thing = importlib.import_module(".".join([top, *rest[: i + 1]]))
            except ImportError:
                return False
    return True


# Whether a file defines `function`, `Class.method` or `CONSTANT`.
def defines(file, dotted):
    nodes = ast.parse(file.read_text()).body
    found = []
    for name in dotted.split("."):
        found = [node for node in nodes if name in defined_by(node)]
        nodes = [child for node in found for child in getattr(node, "body", [])]
    return bool(found)


def defined_by(node):
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name()):
            return {node.target.id}
    return set()


def test_every_path_and_name_in_it_exists():
    assert not list(missing((ROOT / "ARCHITECTURE.md").read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "`jdp/no_such_file.py`",
        "`no_such_file.py`",
        "`no_such_folder/`",
        "`requirements/*.lock`",
        "`jdp.no_such_name`",
        "`@jdp.no_such_name(weight=...)`",
        "`jax.lax.no_such_name`",
        "`tests/repository/test_layers.py:no_such_name`",
        "`tests/support/processes.py:Processes.no_such_method`",
        "[a link](docs/no_such_page.md)",
    ],
)
def test_what_does_not_exist_is_found(text):
    assert len(list(missing(f"See {text}, and `pyproject.toml`."))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`axis.py`, `jdp/axis.py`, `tests/`, `requirements/*.txt`, `.ci/run`",
        "`jdp.axis`, `jax.lax.psum`, `@jax.jit(donate_argnums=...)`",
        "`tests/repository/test_layers.py:ROW`, `tests/support/processes.py:Processes.run`",
        "`1/n`, `state.params`, `w: [d_in, d_out]`, `jdp run`, `[a] / b`",
        "```\nno_such_file.py\n```",
        "[the licence](LICENSE), [a web page](https://example.org/no_such_page.md)",
    ],
)
def test_what_exists_is_accepted(text):
    assert not list(missing(text))
