"""Code shared by a training process and its launcher; needs no JAX."""

# Environment variables' values that switch an option on.
SWITCHED_ON = frozenset(["1", "true", "yes", "on"])
