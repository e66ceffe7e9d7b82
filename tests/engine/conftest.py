"""The models of the engine's tests, built once for each file."""

import pytest
from engine_oracles import FAMILIES, family


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return family(request.param)


@pytest.fixture(scope="module")
def llama():
    return family("llama")
