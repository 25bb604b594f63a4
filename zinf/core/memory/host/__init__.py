"""The host tier, and memory that devices and drives reach."""
