# SPDX-License-Identifier: Apache-2.0
"""Write the published JSON Schemas from the structs that read those documents."""

import json
from pathlib import Path

from rlk import contract, manifest

CORE = Path(__file__).resolve().parents[1] / "core" / "src" / "rlk"


def main() -> None:
    """Overwrite both schema files; the tests beside them compare."""
    for path, schema in (
        (CORE / "contract" / "contract.schema.json", contract.json_schema()),
        (CORE / "manifest.schema.json", manifest.json_schema()),
    ):
        path.write_text(json.dumps(schema, indent=2) + "\n")
        print(path)


if __name__ == "__main__":
    main()
