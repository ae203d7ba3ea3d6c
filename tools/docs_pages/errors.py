# SPDX-License-Identifier: Apache-2.0
"""What stops a build."""


class StageError(Exception):
    """A page breaks a rule: one sentence that names it."""
