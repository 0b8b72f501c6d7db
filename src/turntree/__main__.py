"""`python -m turntree`."""

from turntree.cli.main import main

if __name__ == "__main__":
    main()
