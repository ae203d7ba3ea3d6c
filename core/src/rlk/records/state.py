# SPDX-License-Identifier: Apache-2.0
"""Whether a record is of the sources that are here."""

from collections.abc import Mapping
from typing import Literal

from rlk.records.document import Origin

State = Literal["current", "older"]
CORE = "rlk-core"


def state(origin: Origin, distribution: str, digests: Mapping[str, str | None]) -> State:
    """Whether core and one package are those of a record: `older` means that one has changed.

    Args:
        origin: of the record.
        distribution: the package that the record is about.
        digests: those of the sources that are here, by distribution.
    Returns:
        The state.
    """
    for name in (CORE, distribution):
        source = origin.packages.get(name)
        if source is None or source.digest is None or source.digest != digests.get(name):
            return "older"
    return "current"
