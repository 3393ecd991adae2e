"""A run's leader."""
