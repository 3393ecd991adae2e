"""The compiled all-reduce between a host's GPUs."""
