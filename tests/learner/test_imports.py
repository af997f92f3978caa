import subprocess
import sys

import pytest

import learner


def test_the_public_names_of_learner_exist():
    # ``__all__`` must have constants first, then classes, then functions.
    in_order = sorted(set(learner.__all__), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert learner.__all__ == in_order
    assert all(hasattr(learner, name) for name in learner.__all__)
    with pytest.raises(AttributeError, match="module 'learner' has no attribute 'torch'"):
        _ = learner.torch


def test_config_and_batching_do_not_import_torch():
    code = "import sys, learner.config, learner.batching; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
