"""`jdp run`: starts, watches and replaces the processes of a run. Never imports JAX."""
