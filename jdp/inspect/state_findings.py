"""Findings about what a rank keeps and sends of the state of a step."""

from typing import Any

import jax
import jax.numpy as jnp

from jdp.inspect.finding_inputs import MIN_BYTES, Facts, parameters_of, train_states
from jdp.inspect.report import Finding, of_bytes
from jdp.reduction.sharding import MIN_SIZE, sharding_of


def wide_wire(facts: Facts) -> list[Finding]:
    """Find gradients of parameters of 16 bits that are sent in 32."""
    sent = [
        leaf
        for each in facts.step.traced.collectives
        for leaf in each.leaves
        if each.kind in ("all-reduce", "reduce-scatter")
    ]
    of_paths = parameters_of(facts, (leaf.path for leaf in sent))
    wide = [
        leaf
        for leaf in sent
        if leaf.dtype == "f32" and any(map(_is_narrow, of_paths.get(leaf.path, ())))
    ]
    num_bytes = sum(4 * leaf.num_elements for leaf in wide)
    if not wide or num_bytes < MIN_BYTES:
        return []
    return [
        Finding(
            "wide-wire",
            f"{len(wide)} gradients of parameters of 16 bits are sent as float32, "
            f"{of_bytes(num_bytes)} in a step, such as `{wide[0].path}`.",
            "Half of it goes with jdp.replicated(tx, reduce_dtype=jnp.bfloat16); sums are rounded "
            "to 8 bits then.",
        )
    ]


def _is_narrow(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2


def replicated_optimizer(facts: Facts) -> list[Finding]:
    """Find the state of an optimizer that every rank keeps whole."""
    saved = 0
    for node in train_states(facts):
        if sharding_of(node.tx) is not None:
            continue
        for leaf in jax.tree.leaves(node.opt_state):
            size, itemsize = leaf.size, leaf.dtype.itemsize  # also of random keys
            if size >= MIN_SIZE and any(dim % facts.step.num_ranks == 0 for dim in leaf.shape):
                saved += size * itemsize * (facts.step.num_ranks - 1) // facts.step.num_ranks
    if facts.step.num_ranks == 1 or saved < MIN_BYTES:
        return []
    return [
        Finding(
            "replicated-optimizer-state",
            f"every rank keeps the whole optimizer state, "
            f"{of_bytes(facts.memory.optimizer_state)}.",
            f"jdp.sharded(tx, stage=1) in the place of jdp.replicated(tx) keeps a part on each "
            f"rank: {of_bytes(saved)} less on each of {facts.step.num_ranks} ranks.",
            saved,
        )
    ]


def padding(facts: Facts) -> list[Finding]:
    """Find arguments whose tiles are filled up."""
    arrays = [*facts.step.program.parameters.items()]
    padded = sum(array.padded_bytes() for _, array in arrays)
    plain = sum(array.num_bytes() for _, array in arrays)
    if padded - plain < MIN_BYTES or padded < 1.1 * plain:
        return []
    name, worst = max(arrays, key=lambda item: item[1].padded_bytes() - item[1].num_bytes())
    return [
        Finding(
            "padding",
            f"arguments take {of_bytes(padded)} where their numbers take {of_bytes(plain)}: tiles "
            f"of this device are filled up, most of all those of `{name}` {list(worst.dims)}.",
            "Make the last two dims multiples of the tile, 8 x 128 for float32, or merge small "
            "dims.",
            padded - plain,
        )
    ]
