"""Updates of arrays in host memory, in place."""
