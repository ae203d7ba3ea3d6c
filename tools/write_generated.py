# SPDX-License-Identifier: Apache-2.0
"""Write what is derived: the JSON Schemas, and the hashes of the operator template.

Run it after a change of the structs that read the contract, manifests or records, of the inputs
that gates hash, or of the template. Tests compare all of it.
"""

import json
import sys
from pathlib import Path

from rlk import contract, manifest, records, registry
from rlk.gates import golden_hashes

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "src" / "rlk"
TEMPLATE = ROOT / "tools" / "operator_template" / "src"


def write_schemas() -> None:
    """The schemas, from the structs."""
    for path, schema in (
        (CORE / "contract" / "contract.schema.json", contract.json_schema()),
        (CORE / "manifest.schema.json", manifest.json_schema()),
        (CORE / "records" / "records.schema.json", records.json_schema()),
    ):
        path.write_text(json.dumps(schema, indent=2) + "\n")


def write_template_hashes() -> None:
    """The template is always bits version 1: its hashes may change without a new one."""
    sys.path.insert(0, str(TEMPLATE))
    for operator in registry.declared_in("rlk_demo"):
        golden_hashes.path(operator).unlink(missing_ok=True)
        golden_hashes.write(operator)


if __name__ == "__main__":
    write_schemas()
    write_template_hashes()
