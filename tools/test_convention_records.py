# SPDX-License-Identifier: Apache-2.0
"""Counts of elements that others round otherwise are records like all: kept, and compared."""

import compare_records
import publish_records
from msgspec.structs import replace
from test_records_tools import ORIGIN, gates

from rlk.records import ConventionRow, Conventions, load_folder, write

ROW = ConventionRow(
    operator="demo", size="2 rows of N=4", dtype="bfloat16", rounding="ieee", other="theirs",
    version="1", ppm=3.5, seeds=1, of=2,
)  # fmt: skip
COUNTED = Conventions(origin=ORIGIN, method="bits", rows=[ROW])


def publish(folder, **records):
    (folder / "out").mkdir()
    for name, record in records.items():
        write(folder / "out" / f"{name}.json", record)
    return publish_records.main([str(folder / "out"), str(folder / "kept")])


def test_publish_keeps_the_count_beside_other_records(tmp_path):
    assert publish(tmp_path, a=gates("layout"), conventions=COUNTED) == 0
    kept = load_folder(tmp_path / "kept")
    assert kept.keys() == {"gates.json", "conventions.json"}
    assert kept["conventions.json"] == COUNTED


def test_publish_of_two_counts_is_refused(tmp_path, capsys):
    assert publish(tmp_path, a=COUNTED, b=COUNTED) == 2
    assert "must hold one record for conventions.json, got 2" in capsys.readouterr().err


def test_compare_of_counts_tells_every_element_more():
    more = replace(COUNTED, rows=[replace(ROW, ppm=3.75)])
    (line,) = compare_records.differences(COUNTED, more)
    assert line == "demo 2 rows of N=4 bfloat16 ieee theirs: ppm 3.5 -> 3.75"
