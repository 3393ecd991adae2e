"""The state of a run outside of its processes: commits in memory, checkpoints on disk."""
