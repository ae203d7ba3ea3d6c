# SPDX-License-Identifier: Apache-2.0
"""Records as JSON files: a line for each row, so that a difference is a line too."""

import json
from pathlib import Path
from typing import Any

import msgspec

from rlk.errors import RlkError
from rlk.gates.record import SCHEMA as REPORT
from rlk.gates.record import Report
from rlk.records.document import Document
from rlk.records.gates import summary
from rlk.records.versions import KernelVersions

# Digits kept of a number: more would be noise.
_DIGITS = 4
# What reading JSON raises: malformed, of other types, in another encoding, nested without end.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode(text: bytes, name: object = "record") -> Document:
    """A record of any kind.

    Args:
        text: its JSON.
        name: what an error calls it.
    Returns:
        The record.
    Raises:
        RlkError: it is no record, or a value does not fit; the message names the place.
    """
    try:
        return msgspec.json.decode(text, type=Document)
    except _UNREADABLE as error:
        raise RlkError(f"{name}: must be a record of rlk, got: {error}") from error


def load_folder(folder: Path) -> dict[str, Document]:
    """Every record under a folder, by its path there; reports of gates are counted.

    Args:
        folder: where records lie.
    Returns:
        Records by relative path, sorted.
    Raises:
        RlkError: the folder cannot be read, or a record in it is broken. A file cut short counts as
            one: what its run found would be missed without a word.
    """
    if not folder.is_dir():
        raise RlkError(f"{folder}: must be a folder of records, got none")
    found: dict[str, Document] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.is_dir():
            continue
        if not path.is_file():  # a pipe never ends, a device may neither
            raise RlkError(f"{path}: must be a file, got none, or a pipe or device")
        text = path.read_bytes()
        schema, name = _schema_of(text, path), path.relative_to(folder).as_posix()
        if schema in _KINDS:
            found[name] = decode(text, path)
        elif schema == REPORT:
            found[name] = summary(_decode_report(text, path))
    return found


def load_versions(folder: Path) -> dict[str, KernelVersions]:
    """The versions of kernels under a folder, by path there.

    Args:
        folder: where records lie.
    Returns:
        Versions by relative path, sorted.
    Raises:
        RlkError: a value does not fit, or a rule of versions is broken; the message names both.
    """
    found = {}
    for path in sorted(folder.rglob("kernel-versions.json")):
        try:
            versions = msgspec.json.decode(path.read_bytes(), type=KernelVersions)
        except _UNREADABLE as error:
            raise RlkError(f"{path}: must be versions of kernels, got: {error}") from error
        found[path.relative_to(folder).as_posix()] = versions
    return found


def _decode_report(text: bytes, name: object) -> Report:
    try:
        return msgspec.json.decode(text, type=Report)
    except _UNREADABLE as error:
        raise RlkError(f"{name}: must be a report of rlk gate, got: {error}") from error


def write(path: Path, document: Document | KernelVersions) -> None:
    """Write a record.

    Args:
        path: the file.
        document: the record.
    """
    path.write_text(text_of(document))


def text_of(document: Document | KernelVersions) -> str:
    """A record as it is written: numbers rounded, a line for each row."""
    content = _rounded(msgspec.to_builtins(document))
    lines = ",\n".join(json.dumps(row) for row in content.pop("rows"))
    head = json.dumps(content, indent=1).removesuffix("\n}")
    return f'{head},\n "rows": [\n{lines}\n ]\n}}\n'


def json_schema() -> dict[str, Any]:
    """The JSON Schema of records, as published in `records.schema.json`."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **msgspec.json.schema(Document | KernelVersions)}


def _schema_of(text: bytes, name: object) -> str | None:
    try:
        document = msgspec.json.decode(text)
    except _UNREADABLE as error:
        raise RlkError(f"{name}: must be JSON, got: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    return schema if isinstance(schema, str) else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


_KINDS = {kind.__struct_config__.tag for kind in Document.__args__}
