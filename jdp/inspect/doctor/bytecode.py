"""Whether the imported modules have bytecode, and what it costs each process if they have none."""

from pathlib import Path

from jdp.inspect.doctor.diagnosis import OK, WARNING, Diagnosis
from jdp.worker import bytecode as modules

# Less than this is not worth a warning. The measurement ends after the second number.
_LEAST_S = 0.5
_BUDGET_S = 1.0


def bytecode(least_s: float = _LEAST_S) -> Diagnosis:
    """Return whether the modules that this process has imported have bytecode."""
    imported, missing = modules.sources(), modules.without_bytecode()
    facts = {"modules": len(imported), "without": len(missing), "compile_s": 0.0, "measured": 0}
    if not missing:
        return Diagnosis("bytecode", OK, "all imported modules have bytecode.", facts=facts)
    found = modules.examine(missing, _BUDGET_S)
    facts |= {"compile_s": round(found.s, 3), "measured": found.measured}
    if found.s < least_s:
        text = f"all imported modules but {len(missing)} have bytecode."
        return Diagnosis("bytecode", OK, text, facts=facts)
    text = (
        f"{len(missing)} imported modules have no bytecode: each process compiles them at its "
        f"start, which takes about {_seconds(found.s)} s of a CPU core."
    )
    return Diagnosis("bytecode", WARNING, text, _why(found.why), _do(found.command, missing), facts)


def _why(cause: str) -> str:
    since = f" Python keeps no bytecode, since {cause}." if cause else ""
    return f"Each start of a process or standby takes longer.{since}"


def _do(command: str, missing: list[modules.SourceFile]) -> str:
    text = f"Run `{command}` once, for example when the image is built."
    if any(_is_by_uv(folder) for folder in {source.folder() for source in missing}):
        text += " uv writes no bytecode unless asked: uv pip install --compile-bytecode."
    return text


def _is_by_uv(folder: str) -> bool:
    return any(it.read_text().strip() == "uv" for it in Path(folder).glob("*.dist-info/INSTALLER"))


# Half seconds: equal lines of several processes are printed once.
def _seconds(s: float) -> str:
    return f"{round(2 * s) / 2:g}"
