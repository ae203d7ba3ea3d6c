# SPDX-License-Identifier: Apache-2.0
"""Records that are kept: what was measured, by which sources, on which machine.

document.py says what a record holds, files.py reads and writes it, state.py tells whether it is of
the sources that are here. versions.py is what became of changes to kernels.
"""

from rlk.records.document import (
    FLOOR,
    Bench,
    BenchRow,
    ConventionRow,
    Conventions,
    Document,
    ExactGrad,
    ExactGradRow,
    GateRow,
    GateSummary,
    Install,
    InstallRow,
    Origin,
    Profile,
    ProfileRow,
    Source,
    Survey,
    SurveyRow,
    TensorAccuracy,
    fastest_other,
    origin,
)
from rlk.records.files import decode, json_schema, load_folder, load_versions, write
from rlk.records.gates import summary
from rlk.records.state import State, state
from rlk.records.versions import KernelVersion, KernelVersions, VersionTime

__all__ = [
    "FLOOR",
    "Bench",
    "BenchRow",
    "ConventionRow",
    "Conventions",
    "Document",
    "ExactGrad",
    "ExactGradRow",
    "GateRow",
    "GateSummary",
    "Install",
    "InstallRow",
    "KernelVersion",
    "KernelVersions",
    "Origin",
    "Profile",
    "ProfileRow",
    "Source",
    "State",
    "Survey",
    "SurveyRow",
    "TensorAccuracy",
    "VersionTime",
    "decode",
    "fastest_other",
    "json_schema",
    "load_folder",
    "load_versions",
    "origin",
    "state",
    "summary",
    "write",
]
