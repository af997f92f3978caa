"""The audit recomputes the log-probs of stored samples. Each token names the version that sampled the token."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.run.audit import Audit, audited_lives
from asyncrl.run.forward_audit import check_forward
from asyncrl.run.run_lives import record_policy
from learner.trajectory_log import SCHEMA
from tests.asyncrl.test_run_lives import make_life
from tests.support.tiny_models import save_tiny_model

PROMPT, RESPONSE = [3, 4, 5], [6, 7, 8, 9]


def logprobs_under(folder):
    token_ids = torch.tensor([[*PROMPT, *RESPONSE]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        own = model(token_ids).logits[0, :-1].log_softmax(-1)
    return own.gather(1, token_ids[0, 1:, None])[len(PROMPT) - 1 :, 0].tolist()


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run. It contains the weights of versions 2 and 3, but not of version 4.

    The sample of step 3 has tokens of versions 2 and 3. The sample of step 4 also has a token of version 4.
    """
    folder = make_life(tmp_path / "1", status=0)
    second, third = (folder / "snapshots" / f"v{version:08d}" for version in (2, 3))
    for place, seed in ((second, 2), (third, 3)):
        save_tiny_model(place, seed=seed)
    (folder / "trajectories").mkdir()
    row = {
        "group_id": 7, "attempt": 0, "prompt_ids": PROMPT, "response_ids": RESPONSE, "response_mask": [True] * 4,
        "behavior_logprobs": [*logprobs_under(second)[:2], *logprobs_under(third)[2:]], "learner_logprobs": None,
        "versions": [2, 2, 3, 3], "reward": 1.0, "advantage": 0.5, "lag": 1,
    }  # fmt: skip
    rows = {3: row, 4: row | {"versions": [2, 2, 3, 4]}}
    for step, own in rows.items():
        file = folder / "trajectories" / f"step_{step:08d}_rank0.parquet"
        pq.write_table(pa.Table.from_pylist([own], schema=SCHEMA), file)
    return folder


def test_each_token_is_compared_with_its_version_and_missing_versions_are_named(run):
    result = Audit()
    check_forward(result, audited_lives(run), 2)
    assert result.bad == []
    assert result.checked[0].startswith("log-probs of 1 samples under their versions: mean distance up to ")
    assert result.unchecked == ["log-probs of 1 of 2 samples: the weights of these versions are gone: 4 (in 1 samples)"]


def test_a_sample_that_names_a_wrong_version_is_found(run):
    (run / "snapshots" / "v00000002").rename(run / "snapshots" / "kept")
    (run / "snapshots" / "v00000003").rename(run / "snapshots" / "v00000002")
    (run / "snapshots" / "kept").rename(run / "snapshots" / "v00000003")
    result = Audit()
    check_forward(result, audited_lives(run), 1)
    (fault,) = result.bad
    assert "step 3, group 7: the mean distance of a sample's log-probs to those of versions [2, 3] must be" in str(
        fault
    )


def test_samples_with_images_are_not_checked_and_the_audit_says_why(run):
    (run / "snapshots" / "v00000002" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    result = Audit()
    check_forward(result, audited_lives(run), 5)
    assert (result.bad, result.checked) == ([], [])
    assert result.unchecked == ["log-probs of 5 samples: the model uses images, and images are not stored"]


def test_tokens_of_version_0_are_compared_with_the_initial_policy(run, tmp_path):
    initial = tmp_path / "initial"
    save_tiny_model(initial, seed=5)
    file = run / "trajectories" / "step_00000003_rank0.parquet"
    row = pq.read_table(file).to_pylist()[0] | {"versions": [0] * 4, "behavior_logprobs": logprobs_under(initial)}
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), file)
    for policy, num_checked, num_bad in ((initial, 1, 0), (run / "snapshots" / "v00000002", 1, 1), (run, 0, 0)):
        record_policy(run, policy)
        result = Audit()
        check_forward(result, audited_lives(run), 1)
        assert (len(result.checked), len(result.bad)) == (num_checked, num_bad), policy
