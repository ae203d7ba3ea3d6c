# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels without Torch: compiled by nvcc, loaded by ctypes, launched with raw pointers.

toolchain.py has the flags, header.py the C struct of a call, build.py the cache of binaries,
library.py what a binary must be, probe.py how it must compute, launch.py the backend.
"""
