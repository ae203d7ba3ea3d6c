# SPDX-License-Identifier: Apache-2.0
"""The limits of times name what there is; only here are all packages installed."""

import bench_limits

from rlk.bench import variants


def test_limits_name_operators_and_variants_that_there_are(operators):
    for limits in bench_limits.load().limits:
        for name in limits.operators:
            peers = getattr(variants.prior_art(operators[name]), "PEERS", ())
            names = {peer.name for peer in peers} | {"torch.compile", bench_limits.FLOOR}
            assert limits.against in names | {bench_limits.FASTEST, bench_limits.ABSOLUTE}
