"""The leader of a run: it assigns ranks, and recovers after a failure."""
