"""The launcher of one host: its processes, standbys and their output."""
