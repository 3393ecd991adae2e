"""Environment variables that switch an option on. `jdp run --help` imports this: keep it small."""

# The values that do, in lower case.
SWITCHED_ON = frozenset(["1", "true", "yes", "on"])
