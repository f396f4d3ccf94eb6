"""`python -m vil` runs the `vil` command, for example under torchrun."""

from .cli.main import main

if __name__ == "__main__":
    main()
