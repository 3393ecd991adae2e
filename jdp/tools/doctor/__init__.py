"""`jdp doctor`: whether this machine, or a run's hosts, can train."""
