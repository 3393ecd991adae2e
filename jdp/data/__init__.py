"""Rows of a dataset on their way to the devices."""
