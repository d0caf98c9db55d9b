import pytest

pytestmark = pytest.mark.thorough
