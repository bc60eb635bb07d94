"""docs/support.md lists exactly the parity cases and the refusals there are, with the verdicts that were measured."""

from __future__ import annotations

from parity import CASES
from parity.matrix import RUNS
from parity.support import COLUMNS, MEASURED, PAGE, SAME, page, read

AGAIN = "run `tox -e docs`, which measures the new cases and writes the page"


def test_every_case_was_measured_in_every_run_that_it_belongs_to():
    measured = read()["cases"]
    missing = [(name, case) for name, run in RUNS.items() for case in run.cases if name not in measured.get(case, {})]
    assert not missing, f"{len(missing)} not measured, e.g. {missing[0]}: {AGAIN}"
    assert set(measured) == set(CASES), AGAIN
    assert set(COLUMNS) == set(RUNS)


def test_what_was_measured_is_right():
    cases = read()["cases"].items()
    wrong = [(case, name) for case, found in cases for name, (verdict, _) in found.items() if verdict != SAME]
    assert not wrong, f"{MEASURED.name} says that {wrong} is wrong"


def test_the_page_is_what_cases_and_refusals_make_it():
    assert PAGE.read_text(encoding="utf-8") == page(read()), AGAIN
