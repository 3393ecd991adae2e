"""The leader of a run."""
