"""Results of other libraries."""

from typing import Any

import pytest
from support.folders import task_folders


@pytest.fixture(scope="session")
def record() -> dict[str, Any]:
    """Results of transformers and sentence-transformers."""
    return task_folders.recorded()
