"""Steps seen from outside: what a compiled step takes and sends, before it runs."""
