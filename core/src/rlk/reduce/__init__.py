# SPDX-License-Identifier: Apache-2.0
"""Sums: along a row in one written order, along columns exact."""
