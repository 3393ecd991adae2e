"""Checks that all processes run the same program with the same values."""
