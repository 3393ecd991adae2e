"""The line of the author's program that an error names."""

import functools
import inspect
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from support.analysed import local, pmean, psum, report, table

from jdp.analysis import analyse
from jdp.analysis.diagnostics import source_of


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"{Path(inspect.getsourcefile(function)).name}:{start + offset}"


def test_a_deadlock_and_a_mark_have_the_line_of_their_author():
    def program(w, x):
        grads = jax.grad(lambda w: (w @ x) ** 2)(w)
        grads = local(grads)  # the mark
        return lax.cond(
            x[0] < 2,
            lambda: pmean(grads),  # the collective
            lambda: grads,
        )

    got = report(program)
    # The author's line is the innermost of theirs: `local` and `pmean` are theirs as well.
    assert [found.source for found in got.marks] == [line_of(local, "return mark(")]
    assert [found.source for found in got.deadlocks] == [line_of(pmean, "lax.pmean")]


def test_what_a_library_traced_by_itself_has_the_line_that_called_it():
    def program(w, x):
        return lax.cond(x[0] < 2, functools.partial(lax.psum, axis_name="data"), lambda x: x, x)

    assert [found.source for found in report(program).deadlocks] == [line_of(program, "lax.cond")]


def test_an_output_has_the_line_that_computed_it():
    def program(w, x):
        first = w * x  # computed
        second = jnp.where(x > 0, w, x)  # chosen
        return (local(first.astype(jnp.bfloat16).reshape(2, 2)), second, x, psum(x), x + 1)

    got = report(program, out_specs=(P(), P(), P(), P(), P("data")))
    computed, chosen = line_of(program, "# computed"), line_of(program, "# chosen")
    # What is passed through, agrees, or is said to differ has none.
    assert got.output_sources == (computed, chosen, "", "", "")


class Frame(NamedTuple):
    file_name: str
    line_num: int


class Traceback:
    def __init__(self, *file_names):
        self.frames = [Frame(name, line) for line, name in enumerate(file_names, start=1)]


SITE = sysconfig.get_paths()["purelib"]
STANDARD = sysconfig.get_paths()["stdlib"]
JDP = Path(inspect.getfile(analyse)).parents[1]
LINES = {
    "the author's": (["/home/me/train.py"], "train.py:1"),
    "typed in": (["<stdin>"], "<stdin>:1"),
    "an example of ours": ([str(JDP.parent / "examples" / "digits.py")], "digits.py:1"),
    "innermost": (["/home/me/loss.py", "/home/me/train.py"], "loss.py:1"),
    "jax, jdp, author": ([f"{SITE}/jax/x.py", str(JDP / "sync.py"), "/train.py"], "train.py:3"),
    "flax, author": ([f"{SITE}/flax/linen/module.py", "/train.py"], "train.py:2"),
    "another library, author": ([f"{SITE}/trainer/loop.py", "/train.py"], "train.py:2"),
    "python, author": ([f"{STANDARD}/functools.py", "<frozen runpy>", "/train.py"], "train.py:3"),
    "an installed program": ([f"{SITE}/jax/x.py", f"{SITE}/mine/train.py"], "train.py:2"),
    "nobody": ([f"{SITE}/jax/x.py", f"{STANDARD}/functools.py", str(JDP / "sync.py")], ""),
}


@table(LINES)
def test_the_line_named_is_the_innermost_of_the_author_s(program):
    file_names, want = program
    info = SimpleNamespace(traceback=Traceback(*file_names))
    assert source_of(SimpleNamespace(source_info=info)) == want
    assert source_of(SimpleNamespace(source_info=SimpleNamespace(traceback=None))) == ""
