"""What version 0.1 left on users' disks goes on as it did then."""

import json

import old
import pytest
from test_trainings import assert_as_recorded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    old.unpack(folder)
    old.run(folder)
    return old.sketches(folder), json.loads(old.GOLDEN.read_text())


@pytest.mark.parametrize("name", [*old.STOPPED, *old.STARTED])
def test_it_goes_on(gone_on, name):
    found, golden = gone_on
    assert_as_recorded(found[name], golden[name])
