# SPDX-License-Identifier: Apache-2.0
"""Packages written to a folder as an installer writes them to site-packages."""

from collections.abc import Mapping
from pathlib import Path


def install(site: Path, package: str, files: Mapping[str, str], version: str = "1.0") -> None:
    """Write a package into `site`, with the metadata that announces its operators.

    Args:
        site: the folder that stands for site-packages.
        package: the import name; the distribution is called alike.
        files: text by path below the package's folder.
        version: of the distribution.
    """
    metadata = f"{package}-{version}.dist-info"
    name = package.replace("_", "-")
    texts = {f"{package}/{path}": text for path, text in files.items()}
    texts[f"{metadata}/METADATA"] = f"Name: {name}\nVersion: {version}\n"
    texts[f"{metadata}/entry_points.txt"] = f"[rlk.operators]\n{package} = {package}\n"
    for path, text in texts.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text.lstrip())
