"""`profile` and `jdp timeline`: what ranks did in steps that ran."""
