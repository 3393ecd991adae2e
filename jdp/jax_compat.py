"""Every difference between JAX versions, and JAX's private names: the only place."""

from collections.abc import Mapping
from typing import Any

import jax

# JAX 0.10 transposes `all_gather(to="invarying")` wrongly inside shard_map(check_vma=False).
INVARYING_GATHER_HAS_WRONG_GRADIENT = jax.__version_info__ < (0, 11, 0)

# JAX 0.10 may crash on an array that was donated before, where later versions raise.
DELETED_ARRAY_CRASHES = jax.__version_info__ < (0, 11, 0)

# For `jax.jit(inline=...)`: inline while the caller is traced. Since JAX 0.12 True means later,
# which leaves a function to lower.
INLINE_EARLY = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


def opened(jaxpr: Any) -> Any:
    """Return the jaxpr without its constants: up to JAX 0.10 those are a wrapper around it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values in the parameters of a scan."""
    if "ft_in" in params:  # from JAX 0.11
        constants, carry, _ = params["ft_in"].unpack()
        return len(list(constants)), len(list(carry))
    return params["num_consts"], params["num_carry"]


def joined_processes() -> Any:
    """Return JAX's state of the joined processes, None if this JAX has no such private name."""
    try:
        from jax._src import distributed

        return distributed.global_state
    except (ImportError, AttributeError):
        return None
