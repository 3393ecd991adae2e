"""Connections between launchers, and between a launcher and its processes."""
