"""One process among several: joining a run, agreement between processes, and shutdown."""
