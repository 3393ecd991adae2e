"""`jdp doctor`: whether this machine, or the hosts of a run, can train."""
