# SPDX-License-Identifier: Apache-2.0
"""Write a complete small operator to start from: it passes every gate untouched.

`python tools/new_operator.py NAME` makes an installable package of its own, here or `--into DIR`;
`--package rlk-NAME` adds a folder to a package of this repository.
"""

import argparse
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tools" / "operator_template"
FOLDER = Path("src") / "rlk_demo" / "demo"  # the operator's folder within the template
NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
# Modules of an operator's folder; its function stands beside them in the package.
TAKEN = ("golden", "oracle", "operator", "module", "kernel_triton", "kernel_cuda", "prior_art")


def write(source: Path, target: Path, names: dict[str, str]) -> Path:
    """Copy a folder of text files, with names replaced in paths and contents."""
    if target.exists():
        raise FileExistsError(f"{target} must not exist yet; choose another name or folder")
    for file in sorted(source.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            written = target / _renamed(str(file.relative_to(source)), names)
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(_renamed(file.read_text(encoding="utf-8"), names), encoding="utf-8")
    return target


def new_package(name: str, into: Path) -> Path:
    """An installable package rlk-NAME that holds the operator alone."""
    distribution = f"rlk-{name.replace('_', '-')}"
    names = {"rlk-demo": distribution, "rlk_demo": f"rlk_{name}", "demo": name}
    return write(TEMPLATE, into / distribution, names)


def new_folder(name: str, distribution: str) -> Path:
    """The operator's folder in a package of this repository."""
    module = distribution.replace("-", "_")
    package = ROOT / "packages" / distribution / "src" / module
    if not package.is_dir():
        raise FileNotFoundError(f"--package must be a folder of packages/, got {distribution!r}")
    return write(TEMPLATE / FOLDER, package / name, {"rlk_demo": module, "demo": name})


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub("|".join(names), lambda match: names[match[0]], text)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 2 if the name or the place does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="the operator: lower case, words joined by _")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--into", type=Path, metavar="DIR", default=Path(), help="where a new package goes"
    )
    place.add_argument("--package", metavar="NAME", help="a package of this repository")
    options = parser.parse_args(arguments)
    if not NAME.fullmatch(options.name):
        parser.error(f"name must be lower case words joined by _, got {options.name!r}")
    if keyword.iskeyword(options.name) or options.name in TAKEN:
        parser.error(f"name must be no keyword and no module of the folder, got {options.name!r}")
    if options.name.endswith("_backward"):
        parser.error(f"name must not end in _backward, got {options.name!r}")
    try:
        if options.package:
            made = new_folder(options.name, options.package)
            module = made.parent.name
            print(f"{made}\nexport it in {made.parent / '__init__.py'}:")
            print(f"    from {module}.{options.name} import {options.name}")
        else:
            made = new_package(options.name, options.into)
            print(f"{made}\ninstall it:  pip install -e {made}")
        print(f"judge it:    rlk gate {options.name}")
    except OSError as error:
        fault = f"{error.filename} must be writable, got {error.strerror}"
        parser.exit(2, f"new_operator: {fault if error.strerror else error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
