import sys

from model_converters.cli import main

if __name__ == "__main__":
    sys.exit(main())
