#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The installation of one package alone, as a user without a compiler makes it.
#
#     bash ci/install.sh [WHEELHOUSE]
#
# Builds wheels of core and all packages into a wheelhouse, unless one is given, and installs
# rlk-qwenimage from it into an empty environment; no compiler is on PATH there. Checks what came
# with it, that pip finds no conflict, the time of an import, a call on the CPU and a short gate.
# Then installs both from the checkout, which must bring the sources that the wheels hold.
# Exit status 0 all as it should be, 1 something is not.
set -euo pipefail
WHEELS=${1:+$(cd "$1" && pwd)}
cd "$(dirname "$0")/.."
CHECKOUT=$PWD

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-2.13.0}
WORK=$(mktemp -d)
RM=$(command -v rm)  # found before PATH is emptied
trap '"$RM" -rf "$WORK"' EXIT

"$PYTHON" -m venv "$WORK/venv"
"$WORK/venv/bin/pip" install -q "torch==$TORCH" numpy
if [ -z "$WHEELS" ]; then
    WHEELS=$WORK/wheels
    "$PYTHON" -m venv "$WORK/builder"
    "$WORK/builder/bin/pip" install -q hatchling
    for project in core packages/*; do
        (cd "$project" && "$WORK/builder/bin/python" -m hatchling build -t wheel -d "$WHEELS")
    done
fi

# Nothing but the environment's own programs: no compiler of C or CUDA.
export PATH=$WORK/venv/bin CUDA_HOME=$WORK/none RLK_CACHE_DIR=$WORK/cache
unset PYTHONPATH
cd "$WORK"
# By name: a package index might hold something newer of that name.
pip install -q "$WHEELS"/rlk_core-*.whl "$WHEELS"/rlk_qwenimage-*.whl
pip check
python - <<'END'
import json, shutil, subprocess, sys, time
from importlib.metadata import distributions

BUDGET = 0.2  # seconds beyond `import torch`, in the best of five processes
IMPORT = """
import time, torch
start = time.perf_counter()
import rlk_qwenimage
print(time.perf_counter() - start)
"""


def require(holds, what):
    print(f"{'ok' if holds else 'FAILED'}: {what}")
    if not holds:
        sys.exit(1)


found = sorted(d.name for d in distributions() if d.name.startswith("rlk"))
require(found == ["rlk-core", "rlk-qwenimage"], f"installed of ours: {', '.join(found)}")
compilers = [name for name in ("nvcc", "gcc", "g++", "cc", "c++") if shutil.which(name)]
require(not compilers, f"compilers on PATH: {compilers or 'none'}")
seconds = min(
    float(subprocess.check_output([sys.executable, "-c", IMPORT])) for _ in range(5)
)
require(seconds <= BUDGET, f"import {seconds:.3f} s beyond torch, at most {BUDGET}")

import torch
from rlk_qwenimage import layer_norm_modulate

x = torch.randn(2, 64, 96, requires_grad=True)
scale, shift = torch.randn(2, 96), torch.randn(2, 96)
y = layer_norm_modulate(x, scale, shift)
(dx,) = torch.autograd.grad(y.sum(), x)
require(torch.equal(y[:1], layer_norm_modulate(x[:1], scale[:1], shift[:1])), "a call on the CPU")
report = "gates.json"
gate = ["rlk", "gate", "layer_norm_modulate", "--backend", "golden", "--json", report]
done = subprocess.run(gate, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with open(report) as file:
    records = json.load(file)["records"]
failed = [r for r in records if r["status"] not in ("passed", "not run", "not_run")]
require(done.returncode == 0 and not failed, f"short gates: {len(records)} records")
doctor = subprocess.run(["rlk", "doctor"])
require(doctor.returncode == 0, "rlk doctor")
END

# The same from the checkout, in place of the wheels.
sources() { python -c "from rlk.environment import digests; print(*sorted(digests().items()))"; }
installed=$(sources)
pip uninstall -q -y rlk-core rlk-qwenimage
(cd "$CHECKOUT" && pip install -q ./core ./packages/rlk-qwenimage)
pip check
# Wheels that were handed over may be of other sources.
if [ $# -eq 0 ] && [ "$(sources)" != "$installed" ]; then
    echo "FAILED: the checkout must install what its wheels hold, got $(sources) and $installed"
    exit 1
fi
echo "ok: pip install ./core ./packages/rlk-qwenimage"
