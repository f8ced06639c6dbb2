"""`python -m localrun` is the same program as the `localrun` command."""

from localrun.cli.main import main

if __name__ == "__main__":
    main()
