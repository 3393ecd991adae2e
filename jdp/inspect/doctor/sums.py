"""Every collective on known values, with every element compared on every rank."""

from jax.sharding import Mesh

from jdp.inspect import known_values
from jdp.inspect.collective_case import AUTO, Case, Trial
from jdp.inspect.doctor.diagnosis import ERROR, OK, Diagnosis
from jdp.inspect.exact import WrongResultError

# Elements: one, a few, an odd number, and more than the pieces in which the CPU library sends.
_SIZES = (1, 3, 1001, 300_007)
_DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")
_SIZE_OF_OTHERS = 1001
_NUM_ROUNDS = 2


def self_test(mesh: Mesh, where: str) -> list[Diagnosis]:
    """Return a diagnosis for each collective, by the algorithm of `auto` and by XLA.

    A wrong result does not end the test: all processes make the same calls.
    """
    return [_tested(mesh, where, operation) for operation in known_values.OPERATIONS]


def _tested(mesh: Mesh, where: str, operation: str) -> Diagnosis:
    wrong, num_results = [], 0
    least = 1 if operation == "all-reduce" else mesh.size
    dtypes = [dtype for dtype in _DTYPES if _fits(mesh.size, dtype)]
    pairs = [("float32", size) for size in _SIZES]
    pairs += [(dtype, _SIZE_OF_OTHERS) for dtype in dtypes if dtype != "float32"]
    for algorithm in (AUTO, "xla"):
        cases = [Case(operation, algorithm, dtype, least * size) for dtype, size in pairs]
        trial = Trial(cases, mesh)
        for _ in range(_NUM_ROUNDS):
            trial.prepare()
            trial()
            num_results += len(cases)
            try:
                trial.check()
            except WrongResultError as error:
                wrong.append(str(error))
    facts = {"ranks": mesh.size, "results": num_results, "wrong": wrong}
    name = f"{operation}, {where}"
    if not wrong:
        text = f"{num_results} exact results on each of {mesh.size} ranks ({', '.join(dtypes)})."
        return Diagnosis(name, OK, text, facts=facts)
    first = wrong[0].partition(" Its times")[0]
    return Diagnosis(
        name,
        ERROR,
        f"{len(wrong)} of {2 * _NUM_ROUNDS} programs gave wrong results: {first}",
        "Training here would give wrong parameters without an error.",
        "Do not train on these devices. Try all_reduce=jdp.collectives.xla if only `auto` is "
        "wrong, other devices if both are, and report it with `jdp doctor --json`.",
        facts,
    )


def _fits(num_ranks: int, dtype: str) -> bool:
    try:
        known_values.modulus(num_ranks, dtype)
    except ValueError:
        return False
    return True
