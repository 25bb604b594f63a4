"""What an engine keeps between steps: scalars, keys, the condition of its state."""
