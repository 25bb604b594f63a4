"""zinf 0.1.0: train any JAX model with its state streamed between the memory tiers."""
