"""`jdp run`: starts, watches and replaces processes; never imports JAX."""
