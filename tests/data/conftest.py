"""Shared by the tests of the data code: a server for downloads."""

import pytest

from tests.data.web import serving


@pytest.fixture
def web():
    with serving() as served:
        yield served
