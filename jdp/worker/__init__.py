"""Code that a training process and its launcher share; needs no JAX."""

# Values of environment variables that switch an option on, in lower case.
SWITCHED_ON = frozenset(["1", "true", "yes", "on"])
