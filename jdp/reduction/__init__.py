"""Reductions inside a step: gradients and metrics."""
