"""python -m strop.cli is strop."""

from strop.cli.entry import main

if __name__ == "__main__":
    main()
