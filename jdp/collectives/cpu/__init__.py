"""The compiled all-reduce between a host's CPU devices."""
