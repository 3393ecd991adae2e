"""`jdp plan`: predicted time, memory and efficiency of training on many hosts."""
