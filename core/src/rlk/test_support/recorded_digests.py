# SPDX-License-Identifier: Apache-2.0
"""Digests of golden that a folder keeps, for tests that hold a backend or golden against them."""

from rlk.gates import golden_matrix
from rlk.gates.golden_matrix import Cell
from rlk.launch import trace


def recorded(cell: Cell) -> dict[str, str]:
    """The digests of a cell in the operator's folder."""
    document = golden_matrix.load(cell.operator)
    found, declared = document["bits_version"], cell.operator.bits_version
    assert found == declared, f"digests of bits version {found}, declared {declared}"
    digests = document["digests"]
    return {key: value for key, value in digests.items() if key.startswith(f"{cell.key}/")}


def identity(cell: Cell) -> str:
    """What a test of a cell is called."""
    return f"{cell.operator.name}-{cell.key.replace('/', '-')}"


def assert_recorded(cell: Cell, backend: str, device: str = "cuda") -> None:
    """Assert that a backend, which alone runs, has every digest of a cell."""
    with trace() as launches:
        found = golden_matrix.digests(
            cell, golden_matrix.on_backend(cell.operator, backend, device)
        )
    ran = {launch.backend for launch in launches}
    assert ran == {backend}, f"requested {backend}, ran {ran}"
    expected = recorded(cell)
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    different = [key for key in expected if found[key] != expected[key]]
    assert different == [], different
