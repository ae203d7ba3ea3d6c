# SPDX-License-Identifier: Apache-2.0
"""The table of a run, and its record."""

import json
from pathlib import Path
from typing import Any

from rlk import environment

SCHEMA = "rlk.bench/1"
COLUMNS = (
    ("variant", "variant"), ("forward_us", "fwd us"), ("forward_ratio", "x floor"),
    ("both_us", "fwd+bwd us"), ("both_ratio", "x floor"), ("peer_ratio", "x peer"),
    ("extra_mib", "extra MiB"), ("host_us", "host us"), ("host_train_us", "host us train"),
    ("eager_us", "eager us"), ("eager_train_us", "eager us train"),
)  # fmt: skip
_RATIOS = ("forward_ratio", "both_ratio", "peer_ratio")
# Decimals kept in a record: more would be noise.
_DECIMALS = 3


def table(rows: list[dict[str, Any]]) -> str:
    """Text: a heading for each operator and size, a line for each variant."""
    lines: list[str] = []
    heading = ""
    width = max((len(row["variant"]) for row in rows), default=0)
    for row in rows:
        title = f"{row['operator']} {row['size']} {row['dtype']} {row['layout']}"
        if title != heading:
            heading = title
            lines += ["", title, _line([name for _, name in COLUMNS], width)]
        lines.append(_line([_cell(row, key) for key, _ in COLUMNS], width) + _remarks(row))
    return "\n".join(lines)


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a run: rows, and the environment they were made in."""
    facts = environment.facts()
    core = facts["packages"]["rlk-core"]
    kept = ("device", "driver", "compute_capability", "python", "torch", "triton", "cuda")
    return {
        "schema": SCHEMA,
        "commit": core["commit"],
        "dirty": core["dirty"],
        **{name: facts[name] for name in kept},
        "method": "CUDA graph replay, tensors in rotation, variants interleaved, medians",
        "rows": [_rounded(row) for row in rows],
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The record as JSON, a line for each row."""
    write_document(path, document(rows))


def write_document(path: Path, content: dict[str, Any]) -> None:
    """A document with rows as JSON, a line for each of them."""
    lines = ",\n".join(json.dumps(row) for row in content.pop("rows"))
    head = json.dumps(content, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


def _line(cells: list[str], width: int) -> str:
    """A name of at most `width` letters, and numbers."""
    name, *numbers = cells
    return "  ".join([f"{name:>{max(width, len(name))}}", *(f"{cell:>14}" for cell in numbers)])


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.2f}" if key in _RATIOS else f"{value:.1f}"


def _remarks(row: dict[str, Any]) -> str:
    if row["missing"]:
        return f"  {row['missing']}"
    if "terabytes_per_second" in row:
        speeds = [f"{v:.2f}" for v in row["terabytes_per_second"].values()]
        return f"  {' and '.join(speeds)} TB/s"
    hard = [f"{name} {ratio:.2f}x" for name, ratio in row.get("hard_data", {}).items()]
    return f"  backward with {', '.join(hard)}" if hard else f"  {row['version']}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DECIMALS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
