# SPDX-License-Identifier: Apache-2.0
"""What hatchling calls for a wheel: adds its bill of materials, and compiled kernels if asked to.

RLK_CUDA_ARCHS asks: "all", or names such as "sm_80 sm_90". Core compiles, that of this checkout or
an installed one, so that a package without kernels inside needs neither core nor torch to build.
The file is the same in core and in every package, which a test compares.
"""

import json
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Of core, or of a package of operators."""

    def dependencies(self) -> list[str]:
        """What compiling needs beside hatchling: core, or what core of this checkout needs."""
        if not os.environ.get("RLK_CUDA_ARCHS"):
            return []
        core = self._core()
        if core is None:
            return self.metadata.core.dependencies
        return tomllib.loads((core / "pyproject.toml").read_text())["project"]["dependencies"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put into the wheel what no folder holds."""
        if version == "editable":
            return
        self.made = Path(tempfile.mkdtemp(prefix="rlk-wheel-files-"))
        archs = os.environ.get("RLK_CUDA_ARCHS")
        components = self._add_kernels(archs, build_data) if archs else []
        sbom = self.made / f"{self.metadata.core.raw_name}.cdx.json"
        sbom.write_text(json.dumps(self._sbom(components), indent=1) + "\n")
        build_data["sbom_files"].append(str(sbom))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove them when the wheel is written."""
        if version != "editable":
            shutil.rmtree(self.made)

    def _add_kernels(self, archs: str, build_data: dict[str, Any]) -> list[dict[str, Any]]:
        """Compile the kernels of this distribution; what they hold of others, for the SBOM."""
        sources = Path(self.root) / "src"
        core = self._core()
        sys.path[:0] = [str(sources), *([str(core / "src")] if core else [])]
        from rlk.cuda import wheel
        from rlk.errors import RlkError

        (package,) = (file.parent.name for file in sources.glob("*/__init__.py"))
        try:
            binaries = wheel.compile_package(package, wheel.requested_archs(archs), self.made)
        except RlkError as error:
            shutil.rmtree(self.made)
            self.app.abort(str(error))
        build_data["force_include"].update({str(a): b for a, b in binaries.files.items()})
        build_data["extra_metadata"][str(wheel.EULA)] = wheel.EULA.name
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{binaries.platform}"
        licence = {"license": {"name": "NVIDIA CUDA Toolkit End User License Agreement"}}
        return [
            {
                "type": "library",
                "bom-ref": "cudart",
                "supplier": {"name": "NVIDIA Corporation"},
                "name": "CUDA runtime (libcudart_static)",
                "version": binaries.nvcc,
                "licenses": [licence],
            }
        ]

    def _sbom(self, components: list[dict[str, Any]]) -> dict[str, Any]:
        """CycloneDX: this distribution, and what is linked into it; no time, for equal bytes."""
        name, version = self.metadata.core.raw_name, self.metadata.version
        itself = {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "licenses": [{"expression": self.metadata.core.license_expression}],
        }
        uses = [{"ref": name, "dependsOn": [c["bom-ref"] for c in components]}]
        return {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": itself},
            "components": components,
            "dependencies": uses,
        }

    def _core(self) -> Path | None:
        """The project of core: this one, or one of the same checkout."""
        places = (Path(self.root), Path(self.root).parent.parent / "core")
        return next((p for p in places if (p / "src/rlk/__init__.py").is_file()), None)
