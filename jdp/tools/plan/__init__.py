"""`jdp plan`: predicted time, memory and efficiency on many hosts."""
