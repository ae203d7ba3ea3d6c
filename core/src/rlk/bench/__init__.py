# SPDX-License-Identifier: Apache-2.0
"""Speed and memory beside the least that the hardware allows, in one run on one GPU.

work.py says what a declared operator must move, bandwidth.py how fast this GPU moves it,
timing.py how time is taken, variants.py who takes part, refusals.py who gets no time, measure.py
what is measured. `rlk bench` runs it. conventions.py compares bits, not times;
profile.py lists by ncu.py what limits a kernel.
"""
