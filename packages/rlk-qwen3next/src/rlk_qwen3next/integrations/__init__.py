# SPDX-License-Identifier: Apache-2.0
"""Our norms in engines of others; each is imported by who uses it."""
