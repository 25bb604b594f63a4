"""`python -m zinf.lm_eval`: the command of `lm-eval`, which knows the model `zinf`."""

from zinf.lm_eval import StreamedLM

from lm_eval.__main__ import cli_evaluate  # isort: skip

assert StreamedLM  # Importing it tells lm-eval of it.

if __name__ == "__main__":
    cli_evaluate()
