"""Steps that are one executable: fused and offloaded."""
