"""Shared by all tests: a private data folder, one thread, patient hypothesis (CI machines are slow and busy)."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory):
    """Tests neither read nor fill the data folder of the person who runs them."""
    home = tmp_path_factory.mktemp("fedhur-data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHUR_DATA", str(home))
        yield home
