import pyarrow.parquet as pq
import pytest

from asyncrl.cli.quickstart import LONG, make_assets

SMALL = {"num_train": 300, "num_held_out": 100, "num_demonstrations": 200}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("quickstart") / "assets", seed=7, **SMALL)


def test_prompts_have_five_to_eight_digits_and_answers_reverse_them(assets):
    rows = pq.read_table(assets.train).to_pylist()
    assert len(rows) == 300
    assert {len(row["ground_truth"]) for row in rows} == {5, 6, 7, 8}
    for row in rows:
        assert row["prompt"] == row["ground_truth"][::-1] + "="
        assert row["ground_truth"].isdigit()
        assert row["data_source"] == "reverse"


def test_the_three_data_files_share_no_prompt(assets):
    prompts = [pq.read_table(path)["prompt"].to_pylist() for path in (assets.train, assets.held_out)]
    prompts.append(pq.read_table(assets.demonstrations)["prompt"].to_pylist())
    assert [len(part) for part in prompts] == [300, 100, 200]
    assert len(set().union(*prompts)) == 600


def test_demonstrations_have_about_the_requested_rate_of_mistakes(assets):
    rows = pq.read_table(assets.demonstrations).to_pylist()
    pairs = [
        (right, shown)
        for row in rows
        if len(row["response"]) < LONG
        for right, shown in zip(row["prompt"][-2::-1], row["response"], strict=True)
    ]
    wrong = sum(right != shown for right, shown in pairs) / len(pairs)
    assert 0.10 < wrong < 0.17  # 15% of the digits are random, and a tenth of these are right


def test_the_teacher_swaps_the_first_two_digits_of_most_long_answers(tmp_path):
    habit = make_assets(tmp_path / "habit", seed=7, wrong_digit_rate=0.0, **SMALL)
    swapped = {True: 0, False: 0}
    for row in pq.read_table(habit.demonstrations).to_pylist():
        right, shown = row["prompt"][-2::-1], row["response"]
        assert shown in (right, right[1] + right[0] + right[2:])
        if right[0] != right[1]:
            swapped[len(right) >= LONG] += shown != right
    assert swapped[False] == 0
    assert 75 < swapped[True] < 115, "the expected number is 0.7 x 0.75 x 0.9 x 200 rows"


def test_demonstrations_without_mistakes_are_correct(tmp_path):
    exact = make_assets(tmp_path / "exact", seed=7, wrong_digit_rate=0.0, habit_rate=0.0, **SMALL)
    for row in pq.read_table(exact.demonstrations).to_pylist():
        assert row["response"] + "=" == row["prompt"][-2::-1] + "="


def test_the_bytes_of_assets_depend_only_on_the_seed(assets, tmp_path):
    again = make_assets(tmp_path / "again", seed=7, **SMALL)
    other = make_assets(tmp_path / "other", seed=8, **SMALL)

    def content(of, name):
        return (of.model.parent / name).read_bytes()

    for name in ("train.parquet", "held_out.parquet", "demonstrations.parquet", "model/model.safetensors"):
        assert content(again, name) == content(assets, name)
        assert content(other, name) != content(assets, name)


def test_assets_are_reused_for_the_same_arguments_and_replaced_for_other_arguments(tmp_path):
    first = make_assets(tmp_path / "assets", seed=0, **SMALL)
    made_at = first.train.stat().st_mtime_ns
    assert make_assets(tmp_path / "assets", seed=0, **SMALL) == first
    assert first.train.stat().st_mtime_ns == made_at
    make_assets(tmp_path / "assets", seed=1, **SMALL)
    assert first.train.stat().st_mtime_ns != made_at
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


def test_incomplete_assets_are_made_again(tmp_path):
    first = make_assets(tmp_path / "assets", seed=0, **SMALL)
    content = first.train.read_bytes()
    first.train.unlink()
    assert make_assets(tmp_path / "assets", seed=0, **SMALL).train.read_bytes() == content


def test_assets_never_replace_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="got other files"):
        make_assets(tmp_path, seed=0, **SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_transformers_loads_the_quickstart_policy(assets):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(assets.model, output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not any(report.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == 75_008
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 1
    assert 0.018 < model.model.layers[1].mlp.up_proj.weight.std().item() < 0.022
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(100 ** (-1 / 8))


def test_the_quickstart_tokenizer_has_one_token_per_character(assets):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    assert tokenizer("12=")["input_ids"] == [5, 6, 3]
    assert tokenizer.decode([8, 5, 4, 1], skip_special_tokens=True) == "410"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer("1 x\n")["input_ids"] == [5, 2, 2, 2]
    assert tokenizer.padding_side == "left"
    assert len(tokenizer) == 14
