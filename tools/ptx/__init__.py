# SPDX-License-Identifier: Apache-2.0
"""What tools/check_ptx.py is made of: the rules, and where PTX comes from."""
