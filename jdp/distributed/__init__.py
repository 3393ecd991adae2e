"""One process among several: joining a run, agreement between processes, shutdown."""
