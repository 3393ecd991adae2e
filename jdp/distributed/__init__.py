"""One process among several: how it finds, tells and leaves the others."""
