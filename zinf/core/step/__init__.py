"""Plans and compiles the step of a problem and an optimizer within budgets."""
