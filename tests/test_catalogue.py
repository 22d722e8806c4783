from __future__ import annotations

import json
from pathlib import Path

import pytest

from milepost import build, catalogue
from milepost.encoding import find, names

DATA = Path(__file__).parent / "data"
SYSTEMS = json.loads((DATA / "systems.json").read_text())
SURVEY = json.loads((DATA / "survey-table1.json").read_text())["rows"]


def test_no_system_is_missing() -> None:
    promised = {name for group, systems in SYSTEMS.items() if group != "note" for name in systems.values()}
    assert not promised - set(names())


@pytest.mark.parametrize("row", SURVEY, ids=lambda row: row["name"])
def test_the_survey_table(row: dict[str, object]) -> None:
    info = find(str(row["encoding"]))
    assert info.survey == row["name"]
    assert info.manifestation == str(row["manifestation"]).lower()
    assert info.learnable == row["learnable"]
    assert info.integration == str(row["integration"]).lower()
    assert info.injection == str(row["injection"]).lower()


def test_the_survey_has_fourteen_rows_and_no_name_is_claimed_twice() -> None:
    claimed = [info.survey for info in catalogue() if info.survey is not None]
    assert len(SURVEY) == 14 and sorted(claimed) == sorted(str(row["name"]) for row in SURVEY)


def test_names_that_two_papers_use() -> None:
    with pytest.raises(ValueError, match="cape2021.*dape|dape.*cape2021"):
        build("cape")
    assert find("tise").name == "tisa"
    for name, others in (("hope", ("Hyperbolic", "2509.05218")), ("pope", ("Polar", "2509.10534"))):
        text = " ".join((find(name).cls.__doc__ or "").split())
        assert all(other in text for other in others), text
