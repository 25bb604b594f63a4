"""From a problem, an optimizer and budgets to something that can run."""
