"""``genkit.train`` with the toy method among the methods: what the tests start as a real process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]


def main(argv: list[str]) -> int:
    from genkit import train
    from genkit.registry import METHODS

    METHODS["toy"] = "training.toy_method"
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
