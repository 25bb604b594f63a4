"""What runs behind the public names: from a loss to steps within budgets."""
