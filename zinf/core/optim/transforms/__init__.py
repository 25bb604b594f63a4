"""The optax transforms that a config may ask for."""
