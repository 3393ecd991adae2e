"""One host's launcher."""
