"""Reads dataset rows, and places them on devices in batches."""
