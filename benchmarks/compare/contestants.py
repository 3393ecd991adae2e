"""The contestants by name: their programs, and the setups in which they take part."""

from typing import NamedTuple

JAX, TORCH = "jax", "torch"


class Contestant(NamedTuple):
    """A way to train.

    Attributes:
      framework: JAX or TORCH.
      program: its file in `programs/`, without ".py".
      stage: of `jdp.sharded`.
      is_jdp: whether it is jdp's.
      reduces: whether it computes the gradient of all ranks. Otherwise each rank trains alone, and
        its time is what the others' synchronisation is measured from.
      accumulates_only: whether it differs from another contestant only with micro-batches.
    """

    framework: str
    program: str
    stage: int = 0
    is_jdp: bool = False
    reduces: bool = True
    accumulates_only: bool = False


CONTESTANTS = {
    "jdp.replicated": Contestant(JAX, "jdp_replicated", is_jdp=True),
    "jdp.sharded, stage 1": Contestant(JAX, "jdp_sharded", stage=1, is_jdp=True),
    "jdp.sharded, stage 2": Contestant(JAX, "jdp_sharded", stage=2, is_jdp=True),
    "jdp.sharded, stage 3": Contestant(JAX, "jdp_sharded", stage=3, is_jdp=True),
    "jit": Contestant(JAX, "jit"),
    "jit, constraint": Contestant(JAX, "jit_constraint", accumulates_only=True),
    "explicit sharding": Contestant(JAX, "explicit"),
    "shard_map": Contestant(JAX, "shard_map"),
    "pmap": Contestant(JAX, "pmap"),
    "JAX, no reduction": Contestant(JAX, "no_reduction", reduces=False),
    "torch DDP": Contestant(TORCH, "torch_ddp"),
    "torch FSDP2": Contestant(TORCH, "torch_fsdp2"),
    "torch, no reduction": Contestant(TORCH, "torch_one_device", reduces=False),
}
BASELINE = {JAX: "JAX, no reduction", TORCH: "torch, no reduction"}
ONE_DEVICE = {JAX: "one_device", TORCH: "torch_one_device"}


def taking_part(framework: str, num_micro_batches: int, num_ranks: int) -> list[str]:
    """Return the contestants of a framework that differ from each other in a setup."""
    return [
        name
        for name, one in CONTESTANTS.items()
        if one.framework == framework
        and (num_micro_batches > 1 or not one.accumulates_only)
        and (num_ranks > 1 or one.reduces)
    ]
