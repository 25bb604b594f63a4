"""Models of `transformers` that read images beside text, trained and run."""
