"""What users see is what public_api.txt says: names, signatures, flags, variables.

python tests/repository/test_public_api.py      # writes the file anew
"""

import ast
import contextlib
import difflib
import inspect
import io
import re
import textwrap
from pathlib import Path

import jdp
from jdp.__main__ import main
from jdp.data.loops import Batches
from jdp.launch import flags
from jdp.rank_state import PerRank
from jdp.reduction.optimizer import Replicated
from jdp.tools.debug import FirstNonfinite
from jdp.training.check_step import StepDifference
from jdp.training.step import Step
from jdp.worker.progress import Phase

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("public_api.txt")
# What public functions return: users call methods of it, and do not import it.
RETURNED = (Batches, FirstNonfinite, PerRank, Phase, Replicated, Step.lower, StepDifference)
RENEW = (
    "What users see has changed. If that is meant, write it into CHANGELOG.md and run "
    "python tests/repository/test_public_api.py"
)


# From the source, since annotations read otherwise on another Python or JAX.
def described(name, thing):
    if inspect.isclass(thing) or inspect.isfunction(thing):
        [node] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
        yield from lines_of(node, name)
    else:
        yield name


def lines_of(node, name, indent=""):
    match node:
        case ast.FunctionDef():
            returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            decorators = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
            yield f"{indent}{decorators}{name}({ast.unparse(node.args)}){returned}"
            yield from first_line(node, indent)
        case ast.ClassDef():
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            yield f"{indent}class {name}({bases})"
            yield from first_line(node, indent)
            for member in node.body:
                inner = getattr(member, "name", "")
                if inner == "__init__" or not inner.startswith("_"):
                    yield from lines_of(member, inner, indent + "    ")
        case ast.AnnAssign(target=ast.Name(id=field)) if not field.startswith("_"):
            yield f"{indent}{ast.unparse(node)}"


def first_line(node, indent):
    if doc := ast.get_docstring(node):
        yield f"{indent}    {doc.splitlines()[0]}"


def flags_and_variables():
    parser = flags.Parser()
    for flag in sorted(parser.flags, key=lambda flag: flag.dest):
        yield f"{' '.join(flag.option_strings)}  JDP_{flag.dest.upper()}"


# The other commands, by their help.
COMMANDS = ("doctor", "bench all-reduce", "bench step", "bench faults", "bench --calibrate", "plan")


def flags_of_commands():
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        found = re.findall(r"^  (-[-\w]+)", shown.getvalue(), re.M)
        yield f"jdp {command}  {' '.join(sorted({*found} - {'-h'}))}"


# Those that the code reads by their whole name, and that are no flag's.
def variables():
    of_flags = {f"JDP_{flag.dest.upper()}" for flag in flags.Parser().flags}
    found = set()
    for path in [ROOT / "setup.py", *(ROOT / "jdp").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(r"JDP_[A-Z_]+", str(node.value)):
                found.add(str(node.value))
    return sorted(found - of_flags)


def public_api():
    sections = {
        "jdp": [(f"jdp.{name}", getattr(jdp, name)) for name in jdp.__all__],
        "jdp.collectives": [
            (f"jdp.collectives.{name}", getattr(jdp.collectives, name))
            for name in jdp.collectives.__all__
        ],
        "jdp.debug": [
            (f"jdp.debug.{name}", getattr(jdp.debug, name)) for name in jdp.debug.__all__
        ],
        "What public functions return": [(thing.__qualname__, thing) for thing in RETURNED],
    }
    for title, things in sections.items():
        yield f"# {title}"
        for name, thing in things:
            made_by_users = name.startswith("jdp.")
            lines = described(name, thing)
            yield from (line for line in lines if made_by_users or "    __init__(" not in line)
        yield ""
    yield from ["# jdp run: flags, and their variables", *flags_and_variables(), ""]
    yield from ["# Other commands: flags", *flags_of_commands(), ""]
    yield from ["# Further variables", *variables()]


def test_nothing_that_users_see_has_changed_unsaid():
    differences = difflib.unified_diff(
        FILE.read_text().splitlines(), [*public_api()], "public_api.txt", "now", lineterm=""
    )
    assert not (found := "\n".join(differences)), f"{RENEW}\n{found}"


def test_a_changed_signature_a_new_method_and_a_lost_first_line_are_seen():
    def lines(source):
        [node] = ast.parse(textwrap.dedent(source)).body
        return [*lines_of(node, node.name)]

    before = 'class A:\n    x: int\n    def f(self, a=1): "Return a."\n    def _g(self): pass'
    assert lines(before) == ["class A()", "    x: int", "    f(self, a=1)", "        Return a."]
    for old, new in [("a=1", "a=2"), ("_g", "g"), ('"Return a."', "pass"), ("x: int", "x: str")]:
        assert lines(before.replace(old, new)) != lines(before), (old, new)
    assert lines(before.replace("def _g(self)", "def _g(self, more)")) == lines(before)


if __name__ == "__main__":
    FILE.write_text("\n".join(public_api()) + "\n")
