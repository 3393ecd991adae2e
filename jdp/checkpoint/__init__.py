"""A run's state outside its processes: commits in memory, checkpoints on disk."""
