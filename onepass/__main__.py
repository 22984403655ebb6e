"""`python -m onepass`: the command line."""

from onepass.cli import main

if __name__ == "__main__":
    main()
