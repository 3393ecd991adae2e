"""`jdp bench`: times of collectives, steps and recoveries."""
