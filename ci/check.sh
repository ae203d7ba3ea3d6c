#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Style, types, spelling and structure. Run it as `hatch run check`, which brings the tools.
set -euo pipefail
cd "$(dirname "$0")/.."

ruff check .
ruff format --check .
mypy
codespell
python tools/check_structure.py
