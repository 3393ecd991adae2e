"""Reads the rows of a dataset, and places them on the devices in batches."""
