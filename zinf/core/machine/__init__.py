"""The machine: its devices, its budgets, its rates."""
