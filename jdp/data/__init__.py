"""Reads rows of a dataset, and places them on devices in batches."""
