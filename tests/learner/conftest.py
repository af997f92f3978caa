import pytest

from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny Qwen3. Tests must not change the folder."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
