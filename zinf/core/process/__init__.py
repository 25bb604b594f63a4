"""What zinf does to, and knows of, its Python process."""
