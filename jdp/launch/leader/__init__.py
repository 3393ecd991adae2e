"""The launcher that leads a run: it chooses the hosts, and recovers after a failure."""
