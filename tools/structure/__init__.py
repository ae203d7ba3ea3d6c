# SPDX-License-Identifier: Apache-2.0
"""The rules of tools/check_structure.py, by subject."""
