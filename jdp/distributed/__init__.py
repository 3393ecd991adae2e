"""Joins processes to a run, compares them, and ends them."""
