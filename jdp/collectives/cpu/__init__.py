"""The compiled all-reduce between CPU devices of one host."""
