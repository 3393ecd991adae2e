"""The launcher that leads a run: who takes part, and what follows a failure."""
