"""Makes the shipped pack of emoji from the archive of the npm package ``emoji-datasource-twitter``, bit for bit.

Usage::

    npm pack emoji-datasource-twitter@16.0.0
    python -m genkit.data.make_emoji emoji-datasource-twitter-16.0.0.tgz [--out FILE.npz]

Only ``emoji.json`` and the 64-pixel images are read, without unpacking the archive. Each image is reduced by the mean
of 2 x 2 pixels in premultiplied alpha, so that the colour of pixels nobody sees does not leak into edges::

    α = Σ αᵢ / 4,      c = Σ αᵢ cᵢ / Σ αᵢ

in whole numbers, halves rounded up: the result does not depend on the machine. Names are the package's in lower case;
where two emoji share one, each takes its short name instead.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import tarfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from genkit.data.emoji import EMOJI_SIZE
from genkit.errors import ConfigError

__all__ = ["box_reduce", "emoji_pack", "main"]

SOURCE, SOURCE_VERSION = "emoji-datasource-twitter", "16.0.0"
LICENCE = "Twemoji, copyright Twitter, Inc and other contributors, CC-BY 4.0; reduced to 32 pixels by genkit"
_IMAGES = "package/img/twitter/64/"
# four bytes a pixel: literals are predicted by their place in the pixel
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 2, "dict_size": 1 << 23}
]


def box_reduce(rgba: np.ndarray) -> np.ndarray:
    """Half the size by the mean of 2 x 2 pixels in premultiplied alpha: uint8 (n, 2h, 2w, 4) to uint8 (n, h, w, 4).

    Alpha stays straight; a pixel whose alpha rounds to zero is zero in all channels.
    """
    n, height, width, _ = rgba.shape
    blocks = rgba.astype(np.int64).reshape(n, height // 2, 2, width // 2, 2, 4)
    cover = blocks[..., 3:].sum((2, 4))
    colour = (blocks[..., :3] * blocks[..., 3:]).sum((2, 4))
    alpha = (cover + 2) // 4
    mean = np.where(alpha > 0, (2 * colour + cover) // np.maximum(2 * cover, 1), 0)
    return np.concatenate([mean, alpha], axis=-1).astype(np.uint8)


def emoji_pack(archive: str | Path) -> bytes:
    """The bytes of the pack (see :mod:`genkit.data.emoji`) from the package's ``.tgz``, equal for equal archives.

    Raises:
        ConfigError: no such file, no gzipped tar archive, another package or version, a file missing in it, an image
            that cannot be read or has not 64 x 64 pixels, names that stay equal.
    """
    source = Path(archive).expanduser()
    files = _members(source)
    package = json.loads(_required(files, "package/package.json", source))
    if (package.get("name"), package.get("version")) != (SOURCE, SOURCE_VERSION):
        raise ConfigError(
            f"{source} is {package.get('name')} {package.get('version')}, expected {SOURCE} {SOURCE_VERSION}; "
            f"run npm pack {SOURCE}@{SOURCE_VERSION}"
        )
    entries = json.loads(_required(files, "package/emoji.json", source))
    entries.sort(key=lambda entry: (entry["sort_order"], entry["unified"]))
    images = [_image(_required(files, _IMAGES + entry["image"], source), entry["image"]) for entry in entries]
    table = {
        "format": 1,
        "source": f"{SOURCE} {SOURCE_VERSION}",
        "licence": LICENCE,
        "name": _names(entries),
        "code_points": [entry["unified"].lower() for entry in entries],
        "category": [entry["category"] for entry in entries],
        "subcategory": [entry["subcategory"] for entry in entries],
    }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":"))
    out = io.BytesIO()
    np.savez(out, pixels=_packed(box_reduce(np.stack(images)).tobytes()), table=_packed(text.encode()))
    return out.getvalue()  # the same for the same archive: numpy dates every entry 1980-01-01


def _packed(data: bytes) -> np.ndarray:
    """One xz stream, uint8."""
    return np.frombuffer(lzma.compress(data, format=lzma.FORMAT_XZ, filters=_FILTERS), np.uint8)


def _members(source: Path) -> dict[str, bytes]:
    """The files of the archive that the pack is made from."""
    if not source.is_file():
        raise ConfigError(f"no file {source}; run npm pack {SOURCE}@{SOURCE_VERSION} and give its .tgz")
    wanted, found = ("package/package.json", "package/emoji.json"), {}
    try:
        with tarfile.open(source, "r:gz") as archive:
            for member in archive:
                if member.isfile() and (member.name in wanted or member.name.startswith(_IMAGES)):
                    content = archive.extractfile(member)
                    found[member.name] = content.read() if content else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{source} is no gzipped tar archive, or is cut short ({error}); run npm pack {SOURCE}@{SOURCE_VERSION}"
        ) from error
    return found


def _required(files: dict[str, bytes], name: str, source: Path) -> bytes:
    if name not in files:
        raise ConfigError(f"{source} holds no {name}; its layout is not that of {SOURCE} {SOURCE_VERSION}")
    return files[name]


def _image(data: bytes, name: str) -> np.ndarray:
    """uint8 (64, 64, 4)."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            rgba = np.asarray(image.convert("RGBA"))  # some are stored with a palette
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ConfigError(f"the image {name} cannot be read ({error}); fetch the package again") from error
    size = 2 * EMOJI_SIZE
    if rgba.shape != (size, size, 4):
        raise ConfigError(f"the image {name} has {rgba.shape[1]} x {rgba.shape[0]} pixels, expected {size} x {size}")
    return rgba


def _names(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Unique names in lower case."""
    names = [entry["name"].lower() for entry in entries]
    uses = Counter(names)
    short = [entry["short_name"].replace("_", " ").lower() for entry in entries]
    names = [name if uses[name] == 1 else other for name, other in zip(names, short, strict=True)]
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ConfigError(f"several emoji are called {', '.join(map(repr, repeated))}; names must be unique")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pack to ``--out``, or over the shipped one."""
    parser = argparse.ArgumentParser(prog="python -m genkit.data.make_emoji", description="make the pack of emoji")
    parser.add_argument("archive", type=Path, help=f"{SOURCE}-{SOURCE_VERSION}.tgz")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tables" / "emoji.npz")
    options = parser.parse_args(arguments)
    data = emoji_pack(options.archive)
    options.out.write_bytes(data)
    print(f"{options.out}: {len(data)} bytes")


if __name__ == "__main__":
    main()
