"""Reductions that run behind the backward pass."""
