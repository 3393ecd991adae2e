"""`jdp run`: starts, watches and replaces the processes of a run; never imports JAX."""
