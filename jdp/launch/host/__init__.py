"""The launcher of one host."""
