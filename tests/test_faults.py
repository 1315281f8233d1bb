"""The table of field reports says what is true: tests exist, faults have their place.

That each fault makes its test fail is shown by tests/faults.py, which takes minutes.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from faults_table import FAULTS, Fault

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/field-reports.md").read_text()
# A row: report and what it was, tests, number of faults put in, verdict.
ROWS = re.findall(r"^\| ([A-Z]\d*): [^|]*\|([^|]*)\|([^|]*)\|[^|]*\|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.report} {f.what}")
def test_a_fault_has_one_place(fault: Fault) -> None:
    source = (ROOT / "interlace" / fault.file).read_text()
    assert source.count(fault.old) == 1
    for name in re.findall(r"\S+\.py", fault.tests):
        assert (ROOT / "tests" / name).exists()


def test_every_report_has_a_fault() -> None:
    found = Counter(report for fault in FAULTS for report in fault.report.split())
    said = Counter({report: int(number) for report, _, number in ROWS})
    beyond = found.pop("beyond")
    assert said == found  # so that none has 0
    assert f"{len(ROWS)} reports, each with a fault" in PAGE
    assert f"{len(FAULTS)} faults in all, {beyond} of them beyond the reports" in PAGE


def test_every_test_that_the_page_names_exists() -> None:
    for report, tests, _ in ROWS:
        named = re.findall(r"(test_\w+\.py)(?:::(test_\w+))?|`(test_\w+)`", tests)
        assert named, report
        files = [file for file, _, _ in named if file]
        for file, inside, alone in named:
            places = [file] if file else files
            text = "".join((ROOT / "tests" / place).read_text() for place in places)
            assert f"def {inside or alone}(" in text if inside or alone else text, report
