"""The compiled all-reduce between GPUs of one host."""
