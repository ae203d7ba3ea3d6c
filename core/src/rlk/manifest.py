# SPDX-License-Identifier: Apache-2.0
"""Workload manifests: what a model is, which sizes occur in it, and how it is judged.

A manifest is JSON in UTF-8. It is read strictly: anything missing, unknown, repeated, null or
inconsistent raises one WorkloadError that names the path of the bad value.
`python -m rlk.manifest FILE` checks a manifest, and with `--write` first puts its digests right.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from rlk.errors import WorkloadError
from rlk.manifest_types import Case, Manifest, Site

__all__ = ["Manifest", "digest", "json_schema", "load_manifest", "parse"]


def load_manifest(source: str | Path | bytes, operators: Collection[str] | None = None) -> Manifest:
    """Read and check a manifest.

    Args:
        source: a path, or the JSON itself as bytes.
        operators: names the manifest must cover, all and no other; None skips this check.
    Returns:
        The manifest, frozen.
    Raises:
        WorkloadError: it cannot be read or is malformed; the message names the path.
    """
    document = parse(source)
    manifest = _convert(document)
    if manifest.sha256 != digest(document):
        raise _error("$.sha256", f"{digest(document)} (the document's own digest)", manifest.sha256)
    for check in (_check_architecture, _check_weights, _check_operators, _check_cases):
        check(manifest)
    if operators is not None:
        _check_coverage(manifest, operators)
    return manifest


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document as sorted compact JSON, without its key `sha256`.

    Args:
        document: plain JSON data.
    Returns:
        64 hex digits.
    """
    rest = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of manifests, as published in `manifest.schema.json`.

    Returns:
        A draft 2020-12 schema.
    """
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **msgspec.json.schema(Manifest)}


def parse(source: str | Path | bytes) -> dict[str, Any]:
    """JSON as plain data, refusing what JSON readers usually let pass.

    Args:
        source: a path, or the JSON itself as bytes.
    Returns:
        The document.
    Raises:
        WorkloadError: unreadable, not an object, or with a repeated key, null, NaN or Infinity.
    """
    try:
        text = source if isinstance(source, bytes) else Path(source).read_bytes()
        # A str: of bytes, json would guess UTF-16 and UTF-32.
        document = json.loads(text.decode(), object_pairs_hook=_pairs, parse_constant=_Refused)
        json.dumps(document, ensure_ascii=False).encode()  # fails for a lone surrogate
        refused = [(path, value) for path, value in _walk("$", document) if type(value) is _Refused]
    except RecursionError as error:
        raise _error("$", "readable JSON", "too deep a nesting") from error
    except UnicodeDecodeError as error:
        raise _error("$", "readable JSON in UTF-8", "another encoding") from error
    except UnicodeEncodeError as error:
        raise _error("$", "readable JSON", "a lone surrogate in a string") from error
    except OSError as error:
        reason = error.strerror or error
        raise _error("the file", "readable", f"{str(source)!r} ({reason})") from error
    except ValueError as error:
        raise _error("$", "readable JSON", error) from error
    for path, value in refused:
        raise _error(path, "a plain JSON value", str(value))
    if not isinstance(document, dict):
        raise _error("$", "an object", type(document).__name__)
    return document


class _Refused(str):
    """Stands in the parsed document where JSON said something that is refused."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        found[key] = _Refused("a repeated key") if key in found else value
    return found


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, _Refused("null") if value is None else value
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _walk(f"{path}.{key}", child)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _walk(f"{path}[{index}]", child)


def _convert(document: dict[str, Any]) -> Manifest:
    try:
        return msgspec.convert(document, Manifest)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        path = _name_key(path.strip("`") or "$", document)
        field = re.search(r"(?:missing required|contains unknown) field `(\w+)`", message)
        if field:
            path = f"{path}.{field[1]}"
        raise WorkloadError(f"manifest: {path} must fit the schema, got: {message}") from error


def _name_key(path: str, document: dict[str, Any]) -> str:
    """Replace msgspec's `[...]` by the key: only mappings to numbers and strings have it."""
    mapping, marked, _ = path.partition("[...]")
    if marked:
        for key, value in dict(_walk("$", document))[mapping].items():
            if isinstance(value, bool | dict | list):
                return f"{mapping}.{key}"
    return path


def _check_architecture(manifest: Manifest) -> None:
    architecture = manifest.architecture
    expected = digest(architecture.values)
    if architecture.fingerprint != expected:
        raise _error("$.architecture.fingerprint", f"{expected} for its values", "another digest")
    for key, value in architecture.values.items():
        if isinstance(value, int | float) and value <= 0:
            raise _error(f"$.architecture.values.{key}", "positive", value)


def _check_weights(manifest: Manifest) -> None:
    weights, path = manifest.weights, "$.weights"
    count = len(weights.shards)
    if weights.shard_count != count:
        raise _error(f"{path}.shard_count", f"{count}, the shards listed", weights.shard_count)
    _require_unique(f"{path}.shards", "name", [shard.name for shard in weights.shards])
    for index, shard in enumerate(weights.shards):
        part = re.search(r"(\d+)-of-(\d+)", shard.name)
        if part and (int(part[1]), int(part[2])) != (index + 1, count):
            raise _error(f"{path}.shards[{index}].name", f"part {index + 1} of {count}", shard.name)
    if weights.index_total_bytes > weights.files_total_bytes:
        limit = f"at most files_total_bytes = {weights.files_total_bytes}"
        raise _error(f"{path}.index_total_bytes", limit, weights.index_total_bytes)
    sizes = [shard.size for shard in weights.shards if isinstance(shard.size, int)]
    total = weights.files_total_bytes
    if sum(sizes) > total or (len(sizes) == count and sum(sizes) != total):
        raise _error(f"{path}.files_total_bytes", f"{sum(sizes)}, the sum of the shards", total)


def _check_operators(manifest: Manifest) -> None:
    names = [entry.name for entry in manifest.operators]
    _require_unique("$.operators", "name", names)
    _require_unique("$.execution.dtypes", "", list(manifest.execution.dtypes))
    if sorted(manifest.provenance.scope) != sorted(names):
        raise _error(
            "$.provenance.scope",
            f"the operators {', '.join(names)}",
            ", ".join(manifest.provenance.scope),
        )
    values = manifest.architecture.values
    for i, entry in enumerate(manifest.operators):
        _require_unique(f"$.operators[{i}].sites", "name", [site.name for site in entry.sites])
        for j, site in enumerate(entry.sites):
            _check_site(f"$.operators[{i}].sites[{j}]", site, values)


def _check_site(path: str, site: Site, values: Mapping[str, int | float | str]) -> None:
    facts = {
        "width": (site.width, site.width_from),
        "rows_per_token": (site.rows_per_token, site.rows_per_token_from),
        "instances": (site.instances, site.instances_from),
    }
    for field, (got, source) in facts.items():
        if source is UNSET:
            if got != 1:
                raise _error(f"{path}.{field}_from", f"named for {field} {got}", "nothing")
        elif source not in values:
            known = ", ".join(values)
            raise _error(f"{path}.{field}_from", f"one of the architecture's {known}", source)
        elif got != values[source]:
            raise _error(f"{path}.{field}", f"{source} = {values[source]}", got)


def _check_cases(manifest: Manifest) -> None:
    _require_unique("$.fixtures", "id", [fixture.id for fixture in manifest.fixtures])
    _require_unique("$.cases", "id", [case.id for case in manifest.cases])
    for index, fixture in enumerate(manifest.fixtures):
        total = sum(fixture.sample_lengths)
        if fixture.tokens != total:
            raise _error(
                f"$.fixtures[{index}].tokens", f"{total}, the sum of the samples", fixture.tokens
            )
    fixtures = {fixture.id: fixture for fixture in manifest.fixtures}
    for index, case in enumerate(manifest.cases):
        path = f"$.cases[{index}]"
        if case.fixture not in fixtures:
            raise _error(f"{path}.fixture", f"one of {', '.join(fixtures)}", case.fixture)
        _check_case(path, case, fixtures[case.fixture].sample_lengths)


def _check_case(path: str, case: Case, lengths: tuple[int, ...]) -> None:
    for position, sample in enumerate(case.samples):
        if sample >= len(lengths):
            raise _error(f"{path}.samples[{position}]", f"below {len(lengths)}", sample)
    _require_unique(f"{path}.samples", "", list(case.samples))
    everything = list(range(len(lengths)))
    if case.transform == "singleton" and len(case.samples) != 1:
        raise _error(f"{path}.samples", "one sample", list(case.samples))
    if case.transform == "permuted" and (
        sorted(case.samples) != everything or list(case.samples) == everything
    ):
        raise _error(f"{path}.samples", f"another order of {everything}", list(case.samples))
    if case.transform in ("left_padded", "right_padded"):
        longest = max(lengths[sample] for sample in case.samples)
        if case.pad_to is UNSET or case.pad_to < longest:
            got = "nothing" if case.pad_to is UNSET else case.pad_to
            raise _error(f"{path}.pad_to", f"at least {longest}", got)
    elif case.pad_to is not UNSET:
        raise _error(f"{path}.pad_to", "absent from a case without padding", case.pad_to)
    if case.transform == "chunked" and case.chunk is UNSET:
        raise _error(f"{path}.chunk", "present in a chunked case", "nothing")


def _check_coverage(manifest: Manifest, operators: Collection[str]) -> None:
    for name in sorted(operators):
        manifest.operator(name)
    for index, entry in enumerate(manifest.operators):
        if entry.name not in operators:
            raise _error(
                f"$.operators[{index}].name", f"one of {', '.join(sorted(operators))}", entry.name
            )


def _require_unique(path: str, field: str, values: list[Any]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            where = f"{path}[{index}]" + (f".{field}" if field else "")
            raise _error(where, "unique", value)


def _error(path: str, requirement: str, got: object) -> WorkloadError:
    return WorkloadError(f"manifest: {path} must be {requirement}, got {got}")


def main(arguments: list[str] | None = None) -> None:
    """Check a manifest from the command line, and with `--write` renew its digests."""
    parser = argparse.ArgumentParser(prog="python -m rlk.manifest", description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="write both digests into the file")
    options = parser.parse_args(arguments)
    try:
        if options.write:
            _renew(options.file)
        print(load_manifest(options.file).sha256)
    except (WorkloadError, OSError) as error:
        parser.exit(2, f"{error}\n")


def _renew(file: Path) -> None:
    """Write both digests into a manifest; what else is wrong in it stays for its reader to tell."""
    document = parse(file)
    architecture = document.get("architecture")
    if isinstance(architecture, dict) and isinstance(architecture.get("values"), dict):
        architecture["fingerprint"] = digest(architecture["values"])
    document["sha256"] = digest(document)
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
