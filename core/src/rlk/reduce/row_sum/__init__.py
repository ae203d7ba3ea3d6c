# SPDX-License-Identifier: Apache-2.0
"""Sums and dot products of rows in the chunk-256 order, the same bits on every backend."""
