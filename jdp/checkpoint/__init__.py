"""The state of a run outside its processes: commits in memory, checkpoints on disk."""
