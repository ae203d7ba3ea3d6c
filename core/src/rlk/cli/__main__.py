# SPDX-License-Identifier: Apache-2.0
"""`python -m rlk.cli` is `rlk`."""

from rlk.cli import main

main()
