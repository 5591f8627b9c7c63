"""The table of planted faults fits the sources."""

import itertools
import pathlib

from evaluation.faults import planted_table

ROOT = pathlib.Path(__file__).parents[2]


def test_each_fault_can_be_planted():
    faults = [fault for of_part in planted_table.PLANTED.values() for fault in of_part]
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        assert fault.right != fault.wrong
        assert (ROOT / fault.file).read_text().count(fault.right) == 1, fault.name


def test_all_faults_can_be_planted_together():
    texts = {}
    for fault in itertools.chain.from_iterable(planted_table.PLANTED.values()):
        text = texts.get(fault.file) or (ROOT / fault.file).read_text()
        assert text.count(fault.right) == 1, fault.name
        texts[fault.file] = text.replace(fault.right, fault.wrong)
