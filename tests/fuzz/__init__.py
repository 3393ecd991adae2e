"""The parity fuzzer: random training steps through jdp, each compared with plain JAX.

A `Program` (`program.py`) is a value: a model, an optimizer, weights, a mesh and so on.
`step.py` writes its step with jdp and `subject.py` trains it, `oracle.py` does with JAX and optax
alone, on one device, over the same rows; both share the loss of `model.py`. `check.py` compares
every shard of the state and of the metrics. `draw.py` draws programs; `hunt.py` runs them in child
processes, which `idle.py` ends where they hang, and shrinks what fails. `cases.py` has the programs
that failed once, and the defects that are not mended yet.

    make fuzz                                             # an hour; FUZZ_SECONDS=600 for less
    PYTHONPATH=tests .venv/bin/python -m fuzz --seed 7 --seconds 60
    PYTHONPATH=tests .venv/bin/python -m fuzz --program 'Program(weight="mask")'

A failure prints the seed, the smallest program that fails in the same way, and what differs. Add
that program to `CASES` in `cases.py` with its fix, so that it runs first ever after.
"""
