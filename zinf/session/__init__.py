"""What lasts between steps: scalars, keys, the condition of the state, metrics."""
