"""Code shared by a training process and its launcher; needs no JAX."""

# Values of environment variables that switch an option on.
SWITCHED_ON = frozenset(["1", "true", "yes", "on"])
