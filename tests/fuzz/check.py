"""Running one program and comparing it with the oracle: what a child process does."""

import dataclasses
import itertools
import re
import traceback
import warnings
import zlib
from dataclasses import dataclass

import jax
import numpy as np

from fuzz import oracle, subject
from fuzz.program import refusal

# How far a leaf may be from the oracle, for each of its numbers near 1.
TOLERANCE = {"float64": 1e-10, "float32": 3e-5, "mixed": 3e-5, "float16": 2e-2, "bfloat16": 0.1}
_QUANTIZED = 0.1  # the same, of gradients in 8 bits

# Programs after which a child forgets what it compiled: it runs for an hour.
_CLEAR_AFTER = 100
_num_run = itertools.count(1)

# Roundings in training: each may move the result as far as one of the parameters does.
_ROUNDINGS = 30


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
      kind: "right", "refused" (as may be); or a failure: "wrong", "ranks differ", "other bits",
        "refused without need", "error", "died or hung".
      text: what differs, or the error.
      bits: a checksum of the state, which all processes share.
    """

    kind: str
    text: str = ""
    bits: int = 0

    @property
    def is_failure(self):
        return self.kind not in ("right", "refused")


def run(program, is_cached=True):
    """Train with jdp and with the oracle, and compare every shard here: an `Outcome`."""
    jax.config.update("jax_enable_compilation_cache", is_cached)
    if next(_num_run) % _CLEAR_AFTER == 0:
        jax.clear_caches()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", program.compiler == "quick")
    warnings.filterwarnings("ignore", "the loss does not depend on")
    try:
        got = subject.train(program)
    except (ValueError, TypeError) as error:
        if refusal(program) is not None:
            return Outcome("refused", str(error))
        return Outcome("refused without need", _last_lines())
    except Exception:
        return Outcome("error", _last_lines())
    try:
        if (
            has_equal_bits(program)
            and program.processes == 1
            and (text := _other_bits(program, got))
        ):
            return Outcome("other bits", text)
        return compare(program, got, oracle.train(program), oracle.slack(program))
    except Exception:
        return Outcome("error", _last_lines())


def has_equal_bits(program):
    """Whether a program of virtual ranks has equal bits on all numbers of devices."""
    # docs/reproducibility.md: XLA compiles small loops on one rank otherwise.
    return program.devices > 0 and program.loop != "scan"


def _other_bits(program, got):
    """Name leaves that virtual ranks leave with other bits on another number of devices."""
    devices = 1 if program.devices > 1 else program.ranks
    again = dict(_named(subject.train(dataclasses.replace(program, devices=devices))))
    leaves = [(name, np.asarray(x), np.asarray(again[name])) for name, x in _named(got)]
    return "\n".join(
        f"{name}: {np.sum(x != y)} of {x.size} numbers differ on {devices} devices"
        for name, x, y in leaves
        if x.tobytes() != y.tobytes()
    )


def compare(program, got, want, slack):
    """Compare every shard with every other one and with the oracle, which rounding may move."""
    got_leaves = jax.tree_util.tree_leaves_with_path(got)
    want_leaves, slacks = dict(_named(want)), dict(_named(slack))
    missing = want_leaves.keys() - {_name(path) for path, _ in got_leaves}
    if missing := [name for name in missing if name.startswith("state") or "loss" in name]:
        return Outcome("wrong", f"jdp has no {sorted(missing)}")
    differences, torn, bits = [], [], 0
    for path, leaf in got_leaves:
        name = _name(path)
        if name not in want_leaves:
            return Outcome("wrong", f"the oracle has no {name}")
        expected = np.asarray(want_leaves[name])
        if program.run == "pmap":
            expected = np.broadcast_to(expected, leaf.shape)
        if leaf.shape != expected.shape:
            return Outcome("wrong", f"{name} is {leaf.shape}, not {expected.shape}")
        shards = [(_rank(s, program), s.index, np.asarray(s.data)) for s in leaf.addressable_shards]
        torn += _torn(name, shards, is_stacked=program.run == "pmap")
        slack = _ROUNDINGS * np.max(np.nan_to_num(slacks[name], posinf=np.inf), initial=0)
        differences += _differences(program, name, shards, expected, slack)
        if leaf.is_fully_replicated:
            bits = zlib.crc32(shards[0][2].tobytes(), bits)
    if torn:
        return Outcome("ranks differ", "\n".join(torn[:4]))
    if differences:
        return Outcome("wrong", "\n".join(differences[:6]))
    return Outcome("right", bits=bits)


def _torn(name, shards, *, is_stacked):
    """Name ranks that hold other bits than another one with the same part of the leaf."""
    first, torn = {}, []
    for rank, index, data in shards:
        part = str(index[1:] if is_stacked else index)
        whose, bits = first.setdefault(part, (rank, data.tobytes()))
        if data.tobytes() != bits:
            torn.append(f"{name}: rank {rank} holds other bits than rank {whose}")
    return torn


def _differences(program, name, shards, expected, slack):
    found = []
    if np.isinf(slack):  # it diverged: small dtypes overflow where wide ones do not
        return found
    for rank, index, data in shards:
        part, data = expected[index], np.asarray(data, np.float64)
        both = np.isnan(part) & np.isnan(data)  # of a skipped step
        part, data = np.where(both, 0, part), np.where(both, 0, data)
        scale = 1 + np.max(np.abs(part), initial=0)
        if not np.allclose(data, part, rtol=0, atol=_tolerance(program) * scale + slack):
            off = np.abs(data - part)
            at = np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape)
            where = f"{name}{list(map(int, at)) if at else ''} on rank {rank}"
            found.append(f"{where}: {data[at]:.12g} for {part[at]:.12g} (off by {off[at]:.3g})")
    return found


def _tolerance(program):
    return max(TOLERANCE[program.dtype], _QUANTIZED * (program.algorithm == "quantized"))


def _rank(shard, program):
    return f"{shard.device.id} (process {shard.device.process_index})"


def _named(tree):
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path):
    name = jax.tree_util.keystr(path)
    return re.sub(r"^\[(\d)\]", lambda m: ("state", "metrics of step ")[int(m[1])], name)


def _last_lines():
    return "\n".join(traceback.format_exc().splitlines()[-12:])


def join(outcomes):
    """Make one `Outcome` of those of all processes."""
    for index, outcome in enumerate(outcomes):
        if outcome.is_failure:
            text = f"process {index} of {len(outcomes)}: {outcome.text}"
            return dataclasses.replace(outcome, text=text) if len(outcomes) > 1 else outcome
    if len({(outcome.kind, outcome.bits) for outcome in outcomes}) > 1:
        return Outcome(
            "ranks differ", f"processes end with {[o.kind for o in outcomes]}, other bits"
        )
    return outcomes[0]
