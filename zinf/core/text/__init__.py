"""Text for people and files: complaints, JSON, tables."""
