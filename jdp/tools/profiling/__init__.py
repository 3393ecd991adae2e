"""`profile` and `jdp timeline`: what ranks did."""
