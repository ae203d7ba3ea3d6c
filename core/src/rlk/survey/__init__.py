# SPDX-License-Identifier: Apache-2.0
"""What else is installed, held to the claims of an operator.

peers.py makes another library's function a backend of the declaration, whose own gradients gates
then judge; values.py counts what of a variant depends on the batch, and how far from FP64 it is.
"""
