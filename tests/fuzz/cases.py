"""Programs that failed once, and the defects that are known and not mended yet."""

from fuzz.program import Program

# Item -> programs that show it. They run first.
CASES = {
    "weight over ranks": [
        Program(loss="batch_mean", weight="mask"),
        Program(loss="batch_mean", weight="zero", mesh=(4,)),
        Program(loss="batch_mean", weight="float", rows=4, split="accumulate=2"),
        Program(loss="batch_mean", weight="float", model="late"),
        Program(loss="batch_sum", weight="float"),
        Program(loss="all_gather", weight="mask"),
        Program(loss="maml", weight="mask"),
    ],
    "axis order": [
        Program(mesh=(2, 3), order="reversed", algorithm="ring"),
        Program(mesh=(2, 2), tx_order="other", weight="mask"),
        Program(mesh=(2, 2), reduce="by_axis", weight="mask"),
    ],
    "late models": [Program(model="late_models")],
    "small floats beside an Auto axis": [Program(auto=2, dtype="bfloat16")],
    "subnormal float16": [Program(dtype="float16", tiny=True)],
    "a dim over ranks and further devices": [Program(mesh=(4,), auto=2, tx="stage=2")],
    "skipped updates": [
        Program(optimizer="skipping", mesh=(3,), split="accumulate=2", rows=4),
        Program(optimizer="skipping", tx="stage=2", grad="jdp", model="scan_layers"),
        Program(optimizer="skipping", tx="stage=3", mesh=(2, 2), dtype="float16"),
        Program(optimizer="skipping", library="nnx", tx="stage=1", loop="two_in_jit"),
    ],
    "virtual ranks of empty leaves": [
        Program(mesh=(4,), extra="empty", devices=devices, metrics="all") for devices in (1, 2, 3)
    ],
    "virtual ranks of equal operations": [
        Program(
            mesh=(8,),
            width=24,
            rows=7,
            devices=2,
            metrics="all",
            compiler="default",
            extra="primes",
            loss="jvp",
            split="accumulate=7",
        )
    ],
    "sums between processes": [Program(seed=2, processes=2, mesh=(4,), extra="large")],
}

# Whether a program may fail by a defect.
IS_HIT = {
    "weight over ranks": lambda p: p.weight != "none" and p.loss not in ("rows", "global_mean"),
    "axis order": lambda p: (
        (p.algorithm == "ring" and p.order != p.tx_order)
        or (p.weight != "none" and (p.tx_order == "other" or p.reduce == "by_axis"))
    ),
    "late models": lambda p: p.model == "late_models",
    "small floats beside an Auto axis": lambda p: (
        p.auto > 1 and p.dtype in ("bfloat16", "float16", "mixed")
    ),
    "subnormal float16": lambda p: p.dtype == "float16" and p.tiny,
    "a dim over ranks and further devices": lambda p: p.auto > 1 and p.stage > 0,
    "skipped updates": lambda p: p.skips,
    "virtual ranks of empty leaves": lambda p: p.devices > 0 and p.extra == "empty",
    "virtual ranks of equal operations": lambda p: p.devices > 0,
    "sums between processes": lambda p: p.processes > 1 and p.extra == "large",
}

# Defects of jdp's that are known: their programs must fail, and the fuzzer passes them over.
# Whoever mends one takes it out here.
KNOWN: tuple[str, ...] = ()


def known(program):
    """Return the first known defect that the program may meet, or None."""
    return next((name for name in KNOWN if IS_HIT[name](program)), None)
