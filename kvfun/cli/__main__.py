"""``python -m kvfun.cli``: the same as the ``kvfun`` command."""

from kvfun.cli import main

if __name__ == "__main__":
    main()
