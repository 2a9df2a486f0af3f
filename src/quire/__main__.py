"""``python -m quire``: the command ``quire`` of this Python, whatever ``PATH`` says."""

from quire.cli import main

if __name__ == "__main__":
    main()
