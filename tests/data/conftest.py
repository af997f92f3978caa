import pytest
from transformers import AutoTokenizer

from asyncrl.cli.quickstart import make_assets

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'narrator' %}{{ raise_exception('no narrator here') }}{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}"
    "{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if shout %}9{% endif %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    assets = make_assets(
        tmp_path_factory.mktemp("assets") / "assets", seed=0, num_train=8, num_held_out=8, num_demonstrations=8
    )
    return AutoTokenizer.from_pretrained(assets.model)


@pytest.fixture
def chat_tokenizer(tokenizer, monkeypatch):
    """Return the tokenizer with a chat template.

    The template writes the contents of the messages, and adds ``9`` if the option ``shout`` is set. It writes ``=`` as
    the generation prompt.
    """
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATE)
    return tokenizer
