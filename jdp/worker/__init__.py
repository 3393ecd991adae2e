"""Code that a training process and its launcher share; needs no JAX."""
