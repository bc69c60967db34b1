"""``python -m genkit``: the command line."""

from __future__ import annotations

import sys

from genkit.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
