# SPDX-License-Identifier: Apache-2.0
"""python -m rlk.gates.fresh_process OPERATOR BACKEND SEED: digests of one backend as JSON."""

import json
import sys

from rlk import interpreter


def main() -> None:
    """Print {dtype: {tensor: digest}}."""
    interpreter.enable_without_gpu()
    from rlk import registry
    from rlk.execution import Execution
    from rlk.gates.candidate import Candidate
    from rlk.gates.case import Case
    from rlk.gates.repeatable import digests

    name, backend, seed = sys.argv[1:]
    operator = registry.find(name)
    found = {}
    for dtype in operator.inputs[0].dtype:
        case = Case(operator, backend, "repeatable", dtype, seed=int(seed))
        candidate = Candidate(Execution(operator), backend, case.device)
        found[dtype] = digests(case, candidate)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
