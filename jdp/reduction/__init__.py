"""Reductions inside a step: gradients, metrics, and the time at which they are sent."""
