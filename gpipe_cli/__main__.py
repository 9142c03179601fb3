"""`python -m gpipe_cli` is `gpipe`."""

from gpipe_cli.cli import script

if __name__ == "__main__":
    script()
