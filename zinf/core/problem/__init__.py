"""The user's function, parameters and losses as flat arrays."""
