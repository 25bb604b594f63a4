"""`python -m zinf` is `zinf`."""

from zinf.cli import main

if __name__ == "__main__":
    main()
