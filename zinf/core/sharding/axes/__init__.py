"""The axes of a mesh that divide more than batch and state."""
