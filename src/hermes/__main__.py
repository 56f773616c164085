"""`python -m hermes` is the command `hermes`."""

from hermes.cli import entry

if __name__ == "__main__":
    entry()
