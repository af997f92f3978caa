import pytest

from asyncrl.data.config import DataConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens must be >= 1, got 0"),
        ({"eval_max_prompts": -1}, "data.eval_max_prompts must be >= 0, got -1; 0 uses all"),
        ({"prompt_key": ""}, "data.prompt_key must name a column"),
        ({"ground_truth_key": "reward_model."}, "data.ground_truth_key must be a column name, got 'reward_model.'"),
        ({"extra_keys": [""]}, "data.extra_keys must be a column name"),
        ({"overlong_prompts": "truncate"}, "data.overlong_prompts must be error or filter, got 'truncate'"),
        ({"train_files": "train.parquet"}, r"data.train_files must be a list of paths, got 'train.parquet'"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "data.chat_template is false"),
        ({"system_prompt": "Be brief."}, "data.system_prompt is set to 'Be brief.' but data.chat_template is false"),
        ({"tools_key": "tools"}, "data.tools_key is set to 'tools' but data.chat_template is false"),
        ({"tools_key": "a..b", "chat_template": True}, "data.tools_key must be a column name, got 'a..b'"),
        ({"environment_key": "a."}, "data.environment_key must be a column name, got 'a.'"),
        ({"environment_options_key": "."}, "data.environment_options_key must be a column name, got '.'"),
        (
            {"tools_key": "tools", "chat_template": True, "chat_template_kwargs": {"tools": []}},
            "data.chat_template_kwargs has tools and data.tools_key is 'tools'",
        ),
    ],
)
def test_an_invalid_data_option_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)
