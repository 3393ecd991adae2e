"""Decorated steps, their state, evaluation, and the check of a step."""
