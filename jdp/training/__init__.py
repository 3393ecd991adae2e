"""Decorated steps, their state, evaluation, and `check_step`."""
