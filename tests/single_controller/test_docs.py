"""The code examples of docs/single_controller.md run without changes, in the order of the page."""

import re
from pathlib import Path

import pytest

from asyncrl.single_controller import DISPATCH_MODE_FN_REGISTRY, Dispatch, Role

PAGE = Path(__file__).parents[2] / "docs" / "single_controller.md"
RECIPES = re.findall(r"^## (Recipe: [^\n]+)\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def namespace(cluster):
    yield {"__name__": "__main__"}
    DISPATCH_MODE_FN_REGISTRY.pop(Dispatch.remove("DEAL"))
    Role.remove("Judge")


def test_the_page_contains_three_recipes():
    assert [title for title, _ in RECIPES] == [
        "Recipe: a new worker",
        "Recipe: a new dispatch mode",
        "Recipe: a new resource layout",
    ]


@pytest.mark.long
@pytest.mark.parametrize("code", [code for _, code in RECIPES], ids=[title for title, _ in RECIPES])
def test_each_recipe_runs(namespace, code):
    exec(compile(code, str(PAGE), "exec"), namespace)
