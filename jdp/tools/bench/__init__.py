"""`jdp bench`: times of collectives, steps and recoveries, with every result checked."""
