"""Programs that jdp must accept, and programs that it must refuse."""
